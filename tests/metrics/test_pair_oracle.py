"""Every transition column against the oracle."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_inputs import DTYPES, finished_pair, mask, visit
from metrics_oracle import transition_columns

from loopscope.catalog.registry import TRAINING_METRICS
from loopscope.catalog.tables.transition import PAIR_KINDS
from loopscope.metrics import PairTensors


@st.composite
def pairs(draw):
    experts = draw(st.integers(1, 128))
    k = draw(st.integers(1, experts))
    seed = draw(st.integers(0, 2**31))
    size = {
        "experts": experts,
        "k": k,
        "batch": draw(st.integers(1, 3)),
        "seq": draw(st.integers(1, 9)),
        "width": draw(st.integers(1, 17)),
        "dtype": draw(DTYPES),
    }
    before, a, b = (visit(seed=seed + i, **size) for i in range(3))
    if draw(st.booleans()):
        a.residual[0, 0] = 0  # a denominator that excludes its token
    if draw(st.booleans()):
        b.residual.copy_(a.residual)  # no movement
    kind = draw(st.sampled_from(PAIR_KINDS))
    same = kind == "step_boundary" or (kind == "wrap" and draw(st.booleans()))
    tensors = PairTensors(
        a.residual,
        b.residual,
        before.residual if kind == "step_boundary" and draw(st.booleans()) else None,
        a.topk_idx if same else None,
        b.topk_idx if same else None,
    )
    valid = mask(a, draw(st.sampled_from(["none", "some"])), seed)
    return tensors, valid, {"kind": kind, "same_layer": same, "experts": experts}


def counts_of(idx, valid, experts):
    chosen = idx if valid is None else idx[valid]
    return np.bincount(chosen.numpy().ravel(), minlength=experts)


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_every_transition_column(case):
    t, valid, how = case
    counts = (None, None)
    if how["same_layer"]:
        counts = tuple(counts_of(i, valid, how["experts"]) for i in (t.from_topk_idx, t.to_topk_idx))
    row = finished_pair(t, valid, counts=counts, **how)
    expected = transition_columns(t, valid, **how)
    assert (
        set(expected)
        == set(row.transition)
        == {name for table, name in TRAINING_METRICS if table == "transition"}
    )
    for name, want in expected.items():
        have = row.transition[name]
        if want is None:
            assert have is None, name
            assert row.transition_nulls[name] == "not_applicable", name
        else:
            assert have is not None, (name, row.transition_nulls)
            assert name not in row.transition_nulls
            np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6, err_msg=name)


def test_identity_does_not_move():
    h = torch.randn(2, 5, 8)
    row = finished_pair(PairTensors(h, h.clone()), kind="within_step").transition
    assert row["delta_norm_mean"] == 0
    assert row["relative_delta"] == 0
    assert abs(row["state_cosine"] - 1) < 1e-6
    assert row["growth"] == 1


def test_a_geometric_loop_contracts_by_its_factor():
    h = torch.randn(2, 5, 8)
    step = torch.randn(2, 5, 8)
    a, b = h + step, h + step + 0.5 * step
    row = finished_pair(
        PairTensors(a, b, h, torch.zeros(2, 5, 1, dtype=torch.long), torch.zeros(2, 5, 1, dtype=torch.long)),
        kind="step_boundary",
        same_layer=True,
        experts=4,
    ).transition
    assert abs(row["contraction"] - 0.5) < 1e-5
    assert abs(row["update_cosine"] - 1) < 1e-5


def test_chance_levels_of_the_reference():
    idx = torch.zeros(1, 4, 2, dtype=torch.long)
    idx[..., 1] = 1
    h = torch.randn(1, 4, 3)
    row = finished_pair(PairTensors(h, h, None, idx, idx), kind="step_boundary", same_layer=True, experts=8)
    assert row.transition["overlap_chance"] == 0.25
    assert round(row.transition["jaccard_chance"], 4) == 0.1786
    assert row.transition["topk_overlap"] == 1
    assert row.transition_nulls["load_overlap"] == "absent:no expert counts handed over"


def test_large_expert_sets_take_the_other_way_to_the_same_number():
    # k² > 4E compares memberships, k² <= 4E compares indices.
    for experts, k in ((16, 8), (16, 9), (64, 16), (64, 17), (7, 7)):
        a, b = (visit(experts=experts, k=k, seed=s, seq=31) for s in (1, 2))
        t = PairTensors(a.residual, b.residual, None, a.topk_idx, b.topk_idx)
        how = {"kind": "wrap", "same_layer": True, "experts": experts}
        have, want = finished_pair(t, **how).transition, transition_columns(t, None, **how)
        assert abs(have["topk_overlap"] - want["topk_overlap"]) < 1e-6
        assert abs(have["topk_jaccard"] - want["topk_jaccard"]) < 1e-6


def test_nothing_valid_is_absent_with_chance_levels_kept():
    a = visit()
    t = PairTensors(a.residual, a.residual, None, a.topk_idx, a.topk_idx)
    row = finished_pair(t, mask(a, "all_padding"), kind="step_boundary", same_layer=True, experts=8)
    kept = {name for name, value in row.transition.items() if value is not None}
    assert kept == {
        "overlap_chance",
        "jaccard_chance",
        "nonfinite_count",
        "relative_delta_excluded",
        "growth_excluded",
        "state_cosine_excluded",
    }
    assert row.transition_nulls["topk_overlap"] == "absent:no valid token"


def test_nan_on_either_side_is_null_and_counted():
    a, b = visit(seed=1), visit(seed=2)
    b.residual[0, 3, 2] = torch.nan
    t = PairTensors(a.residual, b.residual, None, a.topk_idx, b.topk_idx)
    row = finished_pair(t, kind="step_boundary", same_layer=True, experts=8)
    assert row.transition["nonfinite_count"] == 1
    assert row.transition["delta_norm_mean"] is None
    assert row.transition_nulls["delta_norm_mean"] == "nonfinite"
    assert row.transition["topk_overlap"] is not None
