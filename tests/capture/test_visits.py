from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loopscope.capture.visits import BlockFacts, VisitPlaces, visits_of
from loopscope.trace import VisitSpec

HUGINN = {"p": 1, "a": 4, "b": 4, "t": 1}


def names(prefix: str, number: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(number)]


def made(calls: dict[str, int | None], **sizes: int) -> VisitPlaces:
    return VisitPlaces({name: BlockFacts(calls=count, **sizes) for name, count in calls.items()})


def where(visits: list[VisitSpec]) -> list[tuple[int, str, int, int]]:
    return [(visit.unrolled_pos, visit.block, visit.loop_step, visit.layer_idx) for visit in visits]


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


@given(
    st.sampled_from([HUGINN, dict.fromkeys(HUGINN), {**HUGINN, "a": None, "b": None}]),
    st.lists(st.integers(1, 4)),
)
def test_a_visit_has_the_same_address_at_every_depth(calls: dict[str, int | None], depths: list[int]) -> None:
    places = made(calls)
    if calls["p"] is None:  # nobody said what is looped: the first step shows it
        calls, depths = {**calls}, [4, *depths]
        places = made(dict.fromkeys(calls, 1))
    for depth in depths:
        found = where(places.visits(["p", *["a", "b"] * depth, "t"]))
        loop = [(1 + 2 * r + i, "loop", r, i) for r in range(depth) for i in range(2)]
        assert found == [(0, "head", 0, 0), *loop, (2 * depth + 1, "tail", 0, 0)]


def test_a_loop_that_runs_no_pass_leaves_head_and_tail() -> None:
    places = made(HUGINN)
    assert where(places.visits(["p", "t"])) == [(0, "head", 0, 0), (1, "tail", 0, 0)]
    assert places.meta(places.visits(["p", "t"])).num_stacks == 1


def test_nested_cycles_and_their_promise() -> None:
    for order in ("LH", "HL"):
        places = made({name: {"L": 4, "H": 2}[name] for name in order})
        found = places.visits(list("LLHLLH"))
        assert where(found) == [
            (0, "loop", 0, 0), (1, "loop", 1, 0), (2, "loop", 1, 1),
            (3, "loop", 2, 0), (4, "loop", 3, 0), (5, "loop", 3, 1),
        ]  # fmt: skip
        assert places.expected() == tuple(found)
        assert places.meta(found).num_layers_in_stack == 2


def test_what_runs_in_one_pass_only_has_the_number_of_that_pass() -> None:
    places = made({"p": 1, "x": None, "a": None, "t": 1})
    assert where(places.visits(list("paxaat"))) == [
        (0, "head", 0, 0), (1, "loop", 0, 1), (2, "loop", 1, 0), (3, "loop", 1, 1), (4, "loop", 2, 1), (5, "tail", 0, 0)
    ]  # fmt: skip
    assert where(places.visits(list("pat"))) == [(0, "head", 0, 0), (1, "loop", 0, 1), (2, "tail", 0, 0)]


def test_a_block_that_is_left_out_leaves_its_place_free() -> None:
    places = made({"p": 1, "x": 1, "a": 2, "b": 2, "t": 1})
    whole = where(places.visits(list("pxababt")))
    assert where(places.visits(list("pababt"))) == [place for place in whole if place[0] != 1]
    assert where(places.visits(list("pxbabt"))) == [place for place in whole if place[0] != 2]
    dense = made({f"layers.{n}": 1 for n in range(4)})
    assert where(dense.visits(["layers.0", "layers.2", "layers.3"])) == [
        (0, "loop", 0, 0), (2, "loop", 0, 2), (3, "loop", 0, 3)
    ]  # fmt: skip


def test_more_calls_than_promised_are_numbered_as_they_come() -> None:
    places = made({"p": 1, "a": 2, "t": 1})
    found = places.visits(list("paaat"))
    assert [visit.unrolled_pos for visit in found] == [0, 1, 2, 3, 4]
    assert [visit.loop_step for visit in found] == [0, 0, 1, 2, 0]
    assert len(places.expected()) == 4


def test_a_visit_whose_router_was_not_called_is_dense() -> None:
    places = made({"a": 1, "b": 1}, num_experts=8, top_k=2)
    found = places.visits(["a", "b"], lambda call: call == 0)
    assert [(visit.num_experts, visit.top_k) for visit in found] == [(8, 2), (0, 0)]
    assert places.meta(found).num_experts == 8
