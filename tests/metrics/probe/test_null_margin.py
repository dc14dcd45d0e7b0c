import math

import numpy as np
import pytest
import torch

from loopscope.errors import MetricInputError
from loopscope.metrics.probe.null_margin import (
    NullRatio,
    cell_of,
    centred,
    null_ratio,
    resampled,
    shuffled,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(documents=60, length=500, experts=8, seed=0):
    return torch.randn(documents, length, experts, generator=seeded(seed))


def ratio(scores, k=2, quantity="margin", scope="batch", shuffles=4):
    return null_ratio(
        scores, k, quantity, scope=scope, generator=seeded(9), num_shuffles=shuffles, num_bootstraps=50
    )


@pytest.mark.parametrize("quantity", ["margin", "selection_gap"])
@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_normal_scores_are_calibrated(quantity, offset, bias):
    scores = normal()
    scores = scores + offset * torch.randn(60, 500, 1, generator=seeded(3))
    scores = scores + bias * torch.randn(8, generator=seeded(4))
    found = ratio(scores, quantity=quantity)
    assert found.rho_cal == pytest.approx(1, abs=0.03)
    assert found.low <= found.rho_cal <= found.high


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (16, 4), (64, 8)])
def test_reference_of_normal_scores(experts, k):
    found = ratio(normal(20, 500, experts), k=k, shuffles=3)
    assert found.rho_ref == pytest.approx(math.sqrt(experts / (experts - 1)), abs=0.02)


def test_uniform_scores_lie_outside_the_calibration_of_normal_ones():
    scores = torch.rand(20, 500, 64, generator=seeded(1))
    found = ratio(scores, k=2, shuffles=3)
    assert found.rho == pytest.approx(0.54, abs=0.01)
    assert found.rho_cal < 0.9  # bounded: the row says that it is not calibrated


def test_structure_is_found():
    # Every token has one expert that it clearly prefers, in turn, so that the columns alone do not show it.
    scores = normal(20, 500)
    scores[
        torch.arange(20)[:, None], torch.arange(500), torch.randint(8, (20, 500), generator=seeded(5))
    ] += 6
    found = ratio(scores, k=2)
    assert found.low > 1.2


def test_shuffle_scopes():
    scores = torch.arange(24.0).reshape(2, 4, 3)
    within = shuffled(scores, "document", seeded())
    assert torch.equal(within.sort(1).values, scores)
    across = shuffled(scores, "batch", seeded())
    assert torch.equal(across.reshape(8, 3).sort(0).values, scores.reshape(8, 3))
    assert not torch.equal(across, scores)


def test_a_document_preference_shows_in_one_scope_only():
    # Within a document all tokens agree on their experts: only shuffling over documents breaks it.
    taste = torch.randn(60, 1, 8, generator=seeded(6)) * 3
    scores = taste + 0.1 * normal(60, 100)
    assert ratio(scores, scope="document").rho < ratio(scores, scope="batch").rho
    assert ratio(scores, scope="document").rho == pytest.approx(1, abs=0.02)


def test_the_surrogate_is_centred_and_drawn_from_each_column():
    scores = centred(normal(2, 50))
    drawn = resampled(scores, seeded())
    assert torch.allclose(drawn.sum(-1), torch.zeros(2, 50), atol=1e-5)


def test_observed_against_numpy():
    scores = normal(3, 20)
    top = np.sort(scores.double().numpy(), -1)[..., ::-1]
    assert ratio(scores, k=3).observed == pytest.approx((top[..., 0] - top[..., 2]).mean(), rel=1e-5)
    gap = ratio(scores, k=3, quantity="selection_gap").observed
    assert gap == pytest.approx((top[..., 2] - top[..., 3]).mean(), rel=1e-5)


def test_what_does_not_exist_or_has_no_default():
    assert ratio(normal(2, 10), k=1) is None
    assert ratio(normal(2, 10), k=8, quantity="selection_gap") is None
    with pytest.raises(MetricInputError, match="scope is 'all'"):
        ratio(normal(2, 10), scope="all")


def test_four_cells():
    wide, narrow = (NullRatio(1.0, 1.0, 1.0, 1.0, low, low, 9.0) for low in (1.2, 1.0))
    assert [cell_of(m, g) for m in (narrow, wide) for g in (narrow, wide)] == [
        "under-specialised",
        "block",
        "hierarchical",
        "strong",
    ]
    assert cell_of(None, wide) is None


@pytest.mark.parametrize("quantity", ["margin", "selection_gap"])
def test_scores_that_do_not_vary_have_no_ratio(quantity):
    # A router that starts at zero: 0/0, which is no error.
    found = ratio(torch.zeros(6, 10, 8), quantity=quantity)
    assert (found.observed, found.null_median) == (0.0, 0.0)
    assert math.isnan(found.rho)
    assert math.isnan(found.rho_cal)
    assert cell_of(found, found) is None


def test_scores_that_are_not_finite_have_no_reading():
    scores = normal(6, 20)
    scores[0, 0, 0] = math.nan
    found = ratio(scores)
    assert math.isnan(found.rho_cal)
    assert cell_of(found, found) is None


@pytest.mark.parametrize("documents", [1, 2, 4, 5])
def test_few_documents_give_a_ratio_without_an_interval(documents):
    margin, gap = (ratio(normal(documents, 50), quantity=name) for name in ("margin", "selection_gap"))
    assert margin.rho_cal == pytest.approx(1, abs=0.5)
    assert (margin.low is None) == (margin.high is None) == (documents < 5)
    assert (cell_of(margin, gap) is None) == (documents < 5)


def test_an_interval_is_of_the_ratio_itself():
    # Documents that are all alike leave no doubt: both ends are the ratio.
    scores = normal(1, 30).expand(8, -1, -1)
    found = ratio(scores, scope="document", shuffles=5)
    assert found.low <= found.rho_cal <= found.high


def test_the_same_seed_gives_the_same_bits():
    assert ratio(normal(3, 40)) == ratio(normal(3, 40))
