from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.capture.passes import merged, passes_of, places, stack_order
from loopscope.capture.promise import promised_calls


@given(
    st.integers(1, 5).flatmap(
        lambda size: st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1, max_size=6)
    )
)
def test_passes_that_leave_layers_out_are_told_apart_where_the_next_goes_back(passes: list[set[int]]) -> None:
    calls = [f"l{layer}" for layers in passes for layer in sorted(layers)]
    order = places([f"l{layer}" for layer in range(5)])
    told = passes_of(calls, order)
    truth = [step for step, layers in enumerate(passes) for _ in layers]
    # Two passes that together still rise look like one, and nothing but the order is known.
    joins = [max(a) < min(b) for a, b in pairwise(passes)]
    assert told == [step - sum(joins[:step]) for step in truth]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_cycles_within_cycles(inner: int, outer: int, layers: int) -> None:
    low = [f"l{layer}" for layer in range(layers)]
    calls = (low * inner + ["h"]) * outer
    assert passes_of(calls, places([*low, "h"]))[-1] + 1 == inner * outer


@pytest.mark.parametrize(
    ("calls", "known", "order"),
    [
        ("abab", "ab", "ab"),
        ("abab", "ba", "ab"),  # written down the wrong way round
        ("LLHLLH", "HL", "LH"),
        ("acbc", "abc", "abc"),  # b is left out first, a then
        ("abaxbab", "abx", "axb"),  # x runs in one pass, between a and b
        ("xabab", "xab", "xab"),
        ("aa", "ab", "ab"),
        ("bb", "ab", "ab"),
        ("ab", "abc", "abc"),
    ],
)
def test_the_order_with_the_fewest_passes(calls: str, known: str, order: str) -> None:
    assert "".join(stack_order(list(calls), list(known))) == order


def test_a_new_layer_stands_behind_the_one_that_it_is_known_to_follow() -> None:
    assert merged(["a", "c"], ["b"], ["a", "b", "c"]) == ["a", "b", "c"]
    assert merged(["b", "c"], ["a"], ["a", "b", "c"]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("counts", "calls"),
    [
        ({"p": 1, "a": 3, "b": 3, "t": 1}, "pabababt"),
        ({"L": 4, "H": 2}, "LLHLLH"),
        ({"H": 2, "L": 4}, "HLLHLL"),
        ({"a": 4, "b": 4, "c": 2}, "ababcababc"),
        ({"e": 3, "d": 2}, "eeedd"),
        ({"a": 2, "m": 1, "b": 2}, "aambb"),
        ({"a": 8, "b": 4, "c": 2}, "aabaabcaabaabc"),
        ({"a": 1, "b": 1}, "ab"),
        ({}, ""),
    ],
)
def test_promised_orders(counts: dict[str, int], calls: str) -> None:
    assert "".join(promised_calls(counts) or []) == calls


def test_no_promise_where_one_block_makes_none() -> None:
    assert promised_calls({"a": 1, "b": None}) is None
