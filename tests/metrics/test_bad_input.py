"""Each wrong input is named, none is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from metrics_inputs import finished, mask, visit

from loopscope.errors import MetricInputError
from loopscope.metrics import PairTensors, VisitTensors, pair_layout, raise_fatal, reduce_pair, visit_layout
from loopscope.metrics.tensors import check_visit


def kinds(row):
    return {fault.kind: fault for fault in row.faults}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"router_logits": torch.zeros(2, 7, 9)}, "router_logits has shape (2, 7, 9), expected (2, 7, 8)"),
        ({"router_probs": torch.zeros(2, 6, 8)}, "router_probs has shape (2, 6, 8)"),
        ({"topk_idx": torch.zeros(2, 7, 3, dtype=torch.long)}, "topk_idx has shape (2, 7, 3)"),
        ({"topk_idx": torch.zeros(2, 7, 2)}, "topk_idx is torch.float32, expected an integer type"),
        ({"topk_weights": torch.zeros(14, 2)}, "topk_weights has shape (14, 2)"),
        ({"router_logits": torch.zeros(2, 7, 8, dtype=torch.long)}, "expected a floating-point type"),
        ({"residual": torch.zeros(14, 16)}, "residual has shape (14, 16), expected [B, S, d]"),
        ({"residual": torch.zeros(2, 0, 16)}, "at least one token"),
        ({"router_probs": None}, "only router_logits, topk_idx, topk_weights given"),
        ({"score_func": "tanh"}, "score_func is 'tanh', expected one of softmax, sigmoid"),
        ({"expert_bias": torch.zeros(7)}, "expert_bias has shape (7,), expected (8,)"),
        ({"selection_scores": torch.zeros(2, 7, 4)}, "selection_scores has shape (2, 7, 4)"),
        ({"router_logits": torch.zeros(2, 7, 8, requires_grad=True)}, "expected a detached tensor"),
    ],
)
def test_shapes_and_types(change, expected):
    with pytest.raises(MetricInputError) as caught:
        check_visit(replace(visit(), **change), None, 8, 2)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "valid", [torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 7), torch.ones(14).bool()]
)
def test_a_wrong_mask(valid):
    with pytest.raises(MetricInputError, match="valid is torch"):
        check_visit(visit(), valid, 8, 2)


def test_claimed_sizes_must_fit():
    with pytest.raises(MetricInputError, match="top_k=3"):
        check_visit(visit(), None, 8, 3)
    with pytest.raises(MetricInputError, match="expected 1 <= top_k <= num_experts"):
        visit_layout(4, 5)
    with pytest.raises(MetricInputError, match="without router tensors"):
        check_visit(VisitTensors(None, None, None, None, torch.ones(1, 1, 1)), None, 8, 2)


def test_transitions_that_cannot_be():
    with pytest.raises(MetricInputError, match="kind is 'sideways'"):
        pair_layout("sideways", False, (0, 0), (0, 0))
    with pytest.raises(MetricInputError, match="one physical layer has"):
        pair_layout("step_boundary", True, (8, 2), (4, 2))
    layout = pair_layout("within_step", False, (8, 2), (8, 2))
    with pytest.raises(MetricInputError, match="from_residual has shape"):
        reduce_pair(PairTensors(torch.ones(1, 2, 3), torch.ones(1, 2, 4)), None, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
def test_probabilities_as_logits_are_refused(dtype, padded):
    v = visit()
    wrong = replace(v, router_logits=v.router_probs.to(dtype))
    row = finished(wrong, mask(v, "some") if padded else None)
    fault = kinds(row)["probabilities_as_logits"]
    assert fault.fatal
    with pytest.raises(MetricInputError, match=r"unrolled_pos 3: router_logits hold probabilities"):
        raise_fatal(row.faults, "unrolled_pos 3")


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(1, 4, 8),
        torch.full((1, 4, 1), 1.0),  # E = 1: a logit of 1 says nothing
        torch.rand(1, 4, 8) + 0.2,  # in [0, 1] or above, but no distribution
        torch.cat([torch.full((1, 1, 8), 1 / 8), torch.randn(1, 3, 8)], 1),  # one row may look like one
    ],
)
def test_logits_that_are_none_pass(logits):
    row = finished(visit(experts=logits.shape[-1], k=1, logits=logits))
    assert "probabilities_as_logits" not in kinds(row)


@pytest.mark.parametrize("bad", [-1, 8, 2**40])
def test_indices_outside_are_counted_and_fatal(bad):
    v = visit()
    v.topk_idx[0, 0, 0] = bad
    row = finished(v)
    fault = kinds(row)["index_out_of_range"]
    assert fault.fatal
    assert fault.count == 1
    assert "outside [0, 8)" in fault.message
    assert sum(row.router["expert_count"]) == 27


def test_weights_that_do_not_sum_to_one_are_counted():
    v = visit()
    v.topk_weights[0, :3] *= 2.5
    fault = kinds(finished(v))["weights_not_normalised"]
    assert fault.count == 3
    assert not fault.fatal


def test_weights_rounded_to_bfloat16_are_normalised_enough():
    v = visit(experts=128, k=64, dtype=torch.bfloat16)
    assert "weights_not_normalised" not in kinds(finished(v))


def test_good_input_has_no_fault():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert finished(visit(dtype=dtype, biased=True)).faults == ()


NEEDS_LOGITS = {
    "z_mean",
    "z_std",
    "z_min",
    "z_max",
    "z_sq_mean",
    "z_frac_negative",
    "logit_rms",
    "logit_abs_max",
}
NEEDS_SCORES = {
    *(f"margin_{x}" for x in ("mean", "min", "hist", "p25", "p50", "p75")),
    *(f"selection_gap_{x}" for x in ("mean", "min", "hist", "p01")),
}
NEEDS_PROBS = {
    "mean_prob",
    "lb_loss",
    "lb_loss_micro_mean",
    "token_entropy_mean",
    "token_entropy_ratio",
    "mutual_information",
    "top1_prob_mean",
    "topk_mass_mean",
}
NEEDS_WEIGHTS = {
    "expert_mass",
    "maxvio_mass",
    "mass_to_count_ratio",
    "effective_topk_mean",
    "effective_topk_excluded",
}


def nonfinite(row):
    return {name for name, reason in row.router_nulls.items() if reason == "nonfinite"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_logit_takes_what_depends_on_it_and_no_more(value):
    v = visit()
    v.router_logits[1, 2, 3] = value
    row = finished(v)
    assert nonfinite(row) == NEEDS_LOGITS | NEEDS_SCORES
    assert row.router["nonfinite_count"] == 1
    assert sum(row.router["expert_count"]) == 28
    assert row.router["lb_loss"] is not None
    assert kinds(row)["nonfinite"].count == 1


def test_a_router_whose_softmax_saw_nan_counts_the_logit_once():
    v = visit()
    v.router_logits[1, 2, 3] = torch.nan
    v.router_probs[1, 2] = torch.nan
    v.topk_weights[1, 2] = torch.nan
    row = finished(v)
    assert nonfinite(row) == NEEDS_LOGITS | NEEDS_SCORES | NEEDS_PROBS | NEEDS_WEIGHTS
    assert row.router["nonfinite_count"] == 1
    assert row.router["maxvio_count"] is not None


def test_bad_probabilities_alone_are_counted_too():
    v = visit()
    v.router_probs[0, 0, :3] = torch.inf
    row = finished(v)
    assert nonfinite(row) == NEEDS_PROBS
    assert row.router["nonfinite_count"] == 3


def test_overflow_of_a_sum_is_null_not_infinite():
    v = visit()
    v.residual[...] = 3e38
    row = finished(v)
    assert row.residual["norm_mean"] is None
    assert row.residual_nulls["norm_mean"] == "nonfinite"
    assert row.residual["abs_max"] == pytest.approx(3e38)


def test_bad_residual_leaves_the_router_alone():
    v = visit()
    v.residual[0, 0, 0] = torch.nan
    row = finished(v)
    assert nonfinite(row) == set()
    assert row.residual["nonfinite_count"] == 1
    assert {n for n, r in row.residual_nulls.items() if r == "nonfinite"} == {
        "norm_mean",
        "rms",
        "abs_max",
        "token_correlation",
        "token_correlation_excluded",
        "token_correlation_pairs",
    }


def test_one_metric_that_fails_costs_the_others_nothing(monkeypatch):
    from loopscope.metrics.router import load

    def broken(weights):
        raise RuntimeError("no entropy today")

    monkeypatch.setattr(load, "entropy", broken)
    row = finished(visit())
    failed = {name for name, reason in row.router_nulls.items() if reason == "failed"}
    assert failed == {column.name for column in load.FAMILY.columns}
    assert "no entropy today" in kinds(row)["metric_failed"].message
    assert row.router["lb_loss"] is not None
