from collections import Counter
from dataclasses import replace

import pytest
from collect_helpers import specs
from hypothesis import given
from hypothesis import strategies as st

from loopscope.collect.pairs import loop_steps_executed, plan_pairs
from loopscope.trace import VisitSpec

SIZES = st.integers(0, 3)


def _kinds(visits):
    found = {}
    for pair in plan_pairs(visits):
        found.setdefault(pair.kind, []).append((pair.source.unrolled_pos, pair.target.unrolled_pos))
    return {kind: sorted(pairs) for kind, pairs in found.items()}


def test_head_two_layers_three_steps_tail():
    assert _kinds(specs()) == {
        "entry": [(0, 1)],
        "within_step": [(1, 2), (3, 4), (5, 6)],
        "step_boundary": [(1, 3), (2, 4), (3, 5), (4, 6)],
        "wrap": [(2, 3), (4, 5)],
        "from_input": [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6)],
        "exit": [(6, 7)],
    }


def test_wrap_equals_step_boundary_with_one_layer():
    kinds = _kinds(specs(layers=1))
    assert kinds["wrap"] == kinds["step_boundary"] == [(1, 2), (2, 3)]
    assert "within_step" not in kinds


def test_before_is_two_loop_steps_back_at_the_same_layer():
    before = {pair.key: pair.before for pair in plan_pairs(specs()) if pair.kind == "step_boundary"}
    assert before == {
        ("step_boundary", 1, 3): None,
        ("step_boundary", 2, 4): None,
        ("step_boundary", 3, 5): 1,
        ("step_boundary", 4, 6): 2,
    }


def test_a_missing_visit_makes_no_strangers_neighbours():
    whole = specs(head=2, tail=2)
    without_last_head = tuple(v for v in whole if v.unrolled_pos != 1)
    assert "entry" not in _kinds(without_last_head)
    assert "from_input" not in _kinds(without_last_head)
    without_first_tail = tuple(v for v in whole if v.unrolled_pos != 8)
    assert "exit" not in _kinds(without_first_tail)
    without_last_loop = tuple(v for v in whole if v.unrolled_pos != 7)
    assert "exit" not in _kinds(without_last_loop)
    without_middle = tuple(v for v in whole if (v.block, v.loop_step, v.layer_idx) != ("loop", 1, 0))
    assert (2, 6) not in _kinds(without_middle)["step_boundary"]


def test_no_loop_no_pairs():
    assert plan_pairs(specs(layers=0, steps=0)) == ()


@given(head=SIZES, layers=st.integers(1, 4), steps=st.integers(1, 4), tail=SIZES)
def test_counts_of_every_kind(head, layers, steps, tail):
    visits = specs(head=head, layers=layers, steps=steps, tail=tail)
    pairs = plan_pairs(visits)
    assert all(pair.source.unrolled_pos < pair.target.unrolled_pos for pair in pairs)
    assert len({pair.key for pair in pairs}) == len(pairs)
    count = Counter(pair.kind for pair in pairs)
    assert count["within_step"] == (layers - 1) * steps
    assert count["step_boundary"] == layers * (steps - 1)
    assert count["wrap"] == steps - 1
    assert count["from_input"] == (layers * steps if head else 0)
    assert count["entry"] == (1 if head else 0)
    assert count["exit"] == (1 if tail else 0)
    assert loop_steps_executed(visits) == steps


@pytest.mark.parametrize("layers", [1, 2])
def test_same_layer_only_between_visits_of_one_physical_layer(layers):
    for pair in plan_pairs(specs(layers=layers)):
        expected = pair.kind == "step_boundary" or (pair.kind == "wrap" and layers == 1)
        assert pair.same_layer is expected


def _nested(text):
    """Visits of cycles within cycles: one letter per call, a space before a new pass."""
    found = []
    for step, passed in enumerate(text.split()):
        for name in passed:
            found.append(
                VisitSpec(
                    unrolled_pos=len(found), block="loop", loop_step=step, layer_idx="LMH".index(name),
                    num_experts=4, top_k=2,
                )
            )  # fmt: skip
    return tuple(found)


def test_cycles_within_cycles_move_from_neighbour_to_neighbour_and_never_back():
    assert _kinds(_nested("L LH L LH")) == {
        "within_step": [(1, 2), (4, 5)],
        "step_boundary": [(0, 1), (1, 3), (2, 5), (3, 4)],
        "wrap": [(0, 1), (2, 3), (3, 4)],
    }
    before = {p.key: p.before for p in plan_pairs(_nested("L LH L LH")) if p.kind == "step_boundary"}
    assert before[("step_boundary", 3, 4)] == 1
    assert before[("step_boundary", 2, 5)] is None


@given(
    st.lists(st.sets(st.sampled_from("LMH"), min_size=1), min_size=1, max_size=6),
    st.integers(0, 1),
    st.integers(0, 1),
)
def test_neighbours_in_time_are_paired_whatever_runs_in_a_pass(passes, head, tail):
    loop = _nested(" ".join("".join(sorted(names, key="LMH".index)) for names in passes))
    outer = {"loop_step": 0, "layer_idx": 0}
    visits = [replace(v, unrolled_pos=v.unrolled_pos + head) for v in loop]
    if head:
        visits.insert(0, replace(loop[0], unrolled_pos=0, block="head", **outer))
    if tail:
        visits.append(replace(loop[0], unrolled_pos=len(visits), block="tail", **outer))
    pairs = plan_pairs(tuple(visits))
    assert all(pair.source.unrolled_pos < pair.target.unrolled_pos for pair in pairs)
    assert len({pair.key for pair in pairs}) == len(pairs)
    moves = {
        (p.source.unrolled_pos, p.target.unrolled_pos)
        for p in pairs
        if p.kind in ("within_step", "wrap", "entry", "exit")
    }
    assert moves == {(pos, pos + 1) for pos in range(len(visits) - 1)}
    boundaries = [pair for pair in pairs if pair.kind == "step_boundary"]
    assert len(boundaries) == len(loop) - len({v.layer_idx for v in loop})
    assert all(pair.same_layer for pair in boundaries)


def test_a_layer_is_not_compared_over_a_gap():
    whole = specs(head=0, tail=0, steps=3)
    assert (1, 5) not in _kinds(tuple(v for v in whole if v.unrolled_pos != 3))["step_boundary"]
