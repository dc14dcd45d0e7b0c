from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loopscope.capture.visits import visits_of


def names(prefix: str, number: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(number)]


@given(st.integers(0, 3), st.integers(1, 4), st.integers(2, 5), st.integers(0, 3))
def test_a_loop_is_told_from_head_and_tail_by_the_calls_alone(
    head: int, layers: int, loops: int, tail: int
) -> None:
    calls = names("head", head) + names("core", layers) * loops + names("tail", tail)
    found = visits_of(calls, {})
    assert [place.unrolled_pos for place in found] == list(range(len(calls)))
    assert [place.block for place in found] == ["head"] * head + ["loop"] * layers * loops + ["tail"] * tail
    loop = [(place.loop_step, place.layer_idx) for place in found if place.block == "loop"]
    assert loop == [(r, i) for r in range(loops) for i in range(layers)]


@given(st.lists(st.integers(0, 40), min_size=1, unique=True).map(sorted))
def test_without_a_loop_every_layer_keeps_its_physical_number(numbers: list[int]) -> None:
    calls = [f"layers.{number}" for number in numbers]
    found = visits_of(calls, dict(zip(calls, numbers, strict=True)))
    assert [place.layer_idx for place in found] == numbers
    assert {place.block for place in found} == {"loop"}
    assert {place.loop_step for place in found} == {0}


def test_a_block_that_is_called_once_inside_the_loop_belongs_to_it() -> None:
    found = visits_of(["a", "b", "a"], {})
    assert [(place.block, place.loop_step, place.layer_idx) for place in found] == [
        ("loop", 0, 0), ("loop", 0, 1), ("loop", 1, 0)
    ]  # fmt: skip
