"""Every router and residual column against the oracle, over random and adversarial visits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from metrics_inputs import finished, visits
from metrics_oracle import Between, check_histogram, check_quantile, residual_columns, router_columns

from loopscope.catalog.registry import TRAINING_METRICS
from loopscope.metrics import VisitTensors

QUANTILES = {"margin_p25": 0.25, "margin_p50": 0.5, "margin_p75": 0.75, "selection_gap_p01": 0.01}

# Absolute tolerance where a value is a difference of two larger ones; scaled by the size of those.
DIFFERENCES = {
    "mutual_information": 1e-5,
    "load_kl_uniform": 1e-9,
    "token_correlation": 1e-5,
    "maxvio_mass": 1e-6,
    "mass_to_count_ratio": 1e-4,
}


def compare(got, expected, nulls, scale):
    assert set(got) == set(expected)
    for name, want in expected.items():
        have = got[name]
        if want is None:
            assert have is None, name
            assert nulls[name] in ("not_applicable", "absent:no expert_bias"), name
            continue
        assert have is not None, (name, nulls)
        if name.endswith("_hist"):
            check_histogram(have, want)
        elif isinstance(want, Between):
            assert want.least - 1e-6 <= have <= want.most + 1e-6, name
        elif name in QUANTILES:
            check_quantile(have, want, QUANTILES[name])
        else:
            atol = DIFFERENCES.get(name, 1e-6) + (1e-6 * scale if name.startswith("z_") else 0)
            np.testing.assert_allclose(have, want, rtol=2e-5, atol=atol, err_msg=name)


def weightless():
    """A sigmoid router whose probabilities underflow: every weight is 0."""
    return VisitTensors(
        router_logits=torch.full((1, 2, 3), -16052.0),
        router_probs=torch.zeros(1, 2, 3),
        topk_idx=torch.tensor([[[0], [2]]]),
        topk_weights=torch.zeros(1, 2, 1),
        residual=torch.ones(1, 2, 4),
        score_func="sigmoid",
    )


@settings(max_examples=100, deadline=None)
@given(visits())
@example((weightless(), None))
def test_every_router_column(case):
    v, valid = case
    row = finished(v, valid)
    expected = router_columns(v, valid)
    scale = max(1.0, float(v.router_logits.double().abs().max()))
    compare(row.router, expected, row.router_nulls, scale)
    assert set(expected) == {name for table, name in TRAINING_METRICS if table == "router"}


@settings(max_examples=100, deadline=None)
@given(visits())
def test_every_residual_column(case):
    v, valid = case
    row = finished(v, valid)
    expected = residual_columns(v.residual, valid)
    compare(row.residual, expected, row.residual_nulls, 1.0)
    assert set(expected) == {name for table, name in TRAINING_METRICS if table == "residual"}


@settings(max_examples=40, deadline=None)
@given(visits(masks=("all_padding",)))
def test_all_padding_has_counts_of_zero_and_no_statistic(case):
    v, valid = case
    row = finished(v, valid)
    experts = v.router_logits.shape[-1]
    assert row.num_tokens == 0
    assert row.router["expert_count"] == [0] * experts
    assert row.router["expert_mass"] == [0.0] * experts
    assert row.router["nonfinite_count"] == 0
    for values, nulls in ((row.router, row.router_nulls), (row.residual, row.residual_nulls)):
        for name, value in values.items():
            if value is None:
                assert nulls[name] in ("not_applicable", "absent:no valid token", "absent:no expert_bias"), (
                    name
                )
            else:
                assert value == 0 or value == [0] * experts, name
                assert name not in nulls


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_padded_token_may_hold_nan(where):
    import torch
    from metrics_inputs import mask, visit

    v = visit(biased=True)
    valid = mask(v, "some")
    clean = finished(v, valid)
    for name in ("router_logits", "router_probs", "topk_weights", "residual", "selection_scores"):
        getattr(v, name)[~valid] = torch.nan if where == "before" else torch.inf
    v.topk_idx[~valid] = -1 if where == "before" else 2**40
    assert finished(v, valid) == clean
