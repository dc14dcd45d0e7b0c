"""Closed forms and the computed reference points."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from metrics_inputs import finished, visit

from loopscope.metrics import VisitTensors


def routed(logits, k):
    return visit(experts=logits.shape[-1], k=k, logits=logits, scale=1.0)


def with_counts(counts, k=1):
    """A visit whose experts are chosen exactly so often."""
    idx = torch.tensor([e for e, c in enumerate(counts) for _ in range(c)]).reshape(1, -1, k)
    tokens, experts = idx.shape[1], len(counts)
    logits = torch.zeros(1, tokens, experts)
    return VisitTensors(
        logits,
        logits.softmax(-1),
        idx,
        torch.full((1, tokens, k), 1 / k),
        torch.ones(1, tokens, 3),
    )


def test_balanced_routing_has_lb_loss_one():
    row = finished(with_counts([3, 3, 3, 3], k=2)).router
    assert row["lb_loss"] == pytest.approx(1.0, abs=1e-12)
    assert row["maxvio_count"] == 0
    assert row["load_entropy_ratio"] == pytest.approx(1.0, abs=1e-12)
    assert row["mass_to_count_ratio"] is None


def test_counts_4_2_1_1():
    row = finished(with_counts([4, 2, 1, 1])).router
    assert row["load_cv"] == pytest.approx(0.6124, abs=5e-5)
    assert row["effective_experts"] / 4 == pytest.approx(0.8409, abs=5e-5)
    assert row["load_entropy_ratio"] == pytest.approx(0.875, abs=1e-12)


def test_z_loss_of_two_tokens():
    row = finished(routed(torch.tensor([[[0.0, 0.0], [math.log(3), 0.0]]]), 1)).router
    assert row["z_sq_mean"] == pytest.approx(1.2011325, abs=1e-6)


def test_dead_expected_of_the_reference():
    row = finished(visit(experts=512, k=8, batch=1, seq=256)).router
    assert row["dead_expected"] == pytest.approx(9.1, abs=0.05)


def test_trailing_dead_experts_do_not_vanish():
    row = finished(with_counts([5, 5, 0, 0, 0])).router
    assert row["expert_count"] == [5, 5, 0, 0, 0]
    assert row["dead_experts"] == 3
    assert row["maxvio_count"] == pytest.approx(1.5)


def test_one_expert_has_no_ratios_and_no_minus_zero():
    v = visit(experts=1, k=1)
    row = finished(v)
    for name in ("load_entropy_ratio", "token_entropy_ratio", "margin_mean", "selection_gap_mean"):
        assert row.router[name] is None
        assert row.router_nulls[name] == "not_applicable"
    for name in ("load_kl_uniform", "token_entropy_mean", "mutual_information", "maxvio_count", "load_cv"):
        assert row.router[name] == 0
        assert math.copysign(1, row.router[name]) == 1, name


def test_identical_tokens_correlate_fully():
    h = torch.randn(3, 1, 32).expand(3, 6, 32).contiguous()
    assert finished(dense(h)).residual["token_correlation"] == pytest.approx(1, abs=1e-6)


def test_independent_gaussian_tokens_do_not_correlate():
    h = torch.randn(4, 256, 64, generator=torch.Generator().manual_seed(0))
    # Standard deviation of the mean of T(T−1)/2·4 cosines of variance 1/d.
    sigma = math.sqrt(1 / 64 / (4 * 256 * 255 / 2))
    assert abs(finished(dense(h)).residual["token_correlation"]) < 5 * sigma


def test_gaussian_norms():
    h = torch.randn(4, 512, 64, generator=torch.Generator().manual_seed(0))
    row = finished(dense(h)).residual
    chi = math.sqrt(2) * math.exp(math.lgamma(65 / 2) - math.lgamma(64 / 2))
    assert row["norm_mean"] == pytest.approx(chi, rel=0.01)
    assert row["rms"] == pytest.approx(1, rel=0.01)


def dense(h):
    return VisitTensors(None, None, None, None, h)


def test_a_dense_visit_has_no_router_row():
    row = finished(dense(torch.ones(1, 2, 4)))
    assert row.router is None
    assert row.router_nulls == {}
    assert row.residual["norm_mean"] == 2


def test_one_token_has_no_pair():
    row = finished(dense(torch.ones(1, 1, 4)))
    assert row.residual["token_correlation"] is None
    assert row.residual_nulls["token_correlation"] == "not_applicable"


def test_a_sharded_sequence_has_no_token_correlation():
    row = finished(dense(torch.ones(1, 4, 4)), sequence_sharded=True)
    assert row.residual_nulls["token_correlation"].startswith("absent:")


def test_sigmoid_router_has_no_z():
    row = finished(visit(score_func="sigmoid"))
    assert row.router["z_mean"] is None
    assert row.router_nulls["z_mean"] == "not_applicable"
    assert row.router["lb_loss"] is not None


def test_experts_come_from_topk_idx_not_from_the_logits():
    v = visit(experts=4, k=1, seq=8)
    forced = VisitTensors(
        v.router_logits, v.router_probs, torch.full_like(v.topk_idx, 3), v.topk_weights, v.residual
    )
    assert finished(forced).router["expert_count"] == [0, 0, 0, 16]


def test_margin_uses_selection_scores_where_given():
    v = visit(experts=6, k=2, biased=True)
    ordered = np.sort(v.selection_scores.numpy(), axis=-1)[..., ::-1]
    row = finished(v).router
    assert row["margin_mean"] == pytest.approx((ordered[..., 0] - ordered[..., 1]).mean(), rel=1e-5)
    assert row["selection_gap_min"] == pytest.approx((ordered[..., 1] - ordered[..., 2]).min(), rel=1e-4)


def test_ties_give_zero_gaps():
    row = finished(visit(scale=0.0, experts=8, k=2)).router
    assert row["margin_mean"] == 0
    assert row["selection_gap_min"] == 0
    assert row["selection_gap_hist"][0] == 14
    assert row["selection_gap_p01"] < 2**-16
