"""Is a router's margin wider than its scores alone explain? The margin against shuffled scores, calibrated."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from loopscope.errors import MetricInputError

Scope = Literal["batch", "document"]
Quantity = Literal["margin", "selection_gap"]
Cell = Literal["under-specialised", "block", "hierarchical", "strong"]

CALIBRATION_TOLERANCE = 0.03
"""ρ_cal of a router without structure lies within 1 ± this at 30,000 tokens, for normal scores."""
MIN_DOCUMENTS = 5
"""Fewer give no interval, and so no reading: of routers without structure (E = 8, k = 2, 128 tokens a document)
33% would be read as having some from 2 documents, 10% from 4, 4% from 5 and 1% from 13."""


@dataclass(frozen=True, slots=True)
class NullRatio:
    """One quantity of one visit against its null. NaN is what is not finite, or 0/0: scores that do not vary."""

    observed: float
    """Mean over tokens."""
    null_median: float
    """Median over shuffles of the mean over tokens."""
    rho: float
    """observed / null_median."""
    rho_ref: float
    """The same ratio of a surrogate without structure."""
    rho_cal: float
    """rho / rho_ref; 1 where there is no structure, for normal scores."""
    low: float | None
    """Lower end of the 95% interval of rho_cal, by resampling documents; None with fewer than `MIN_DOCUMENTS`."""
    high: float | None
    """Upper end; None as `low`."""


def centred(scores_DSE: Float[Tensor, "D S E"]) -> Float[Tensor, "D S E"]:
    """Scores less their mean over the experts, token by token, in float32; offsets of a token vanish."""
    scores_DSE = scores_DSE.float()
    return scores_DSE - scores_DSE.mean(-1, keepdim=True)


def shuffled(scores_DSE: Tensor, scope: str, generator: torch.Generator) -> Tensor:
    """Each expert's column in an order of its own, over all tokens or within each document."""
    shape = scores_DSE.shape
    flat = scores_DSE.reshape(1, -1, shape[-1]) if scope == "batch" else scores_DSE
    keys = torch.rand(flat.shape, generator=generator, device=generator.device).to(flat.device)
    return flat.gather(1, keys.argsort(1)).reshape(shape)


def resampled(scores_DSE: Tensor, generator: torch.Generator) -> Tensor:
    """A surrogate without structure: each column drawn from itself with replacement, then centred again."""
    flat = scores_DSE.reshape(-1, scores_DSE.shape[-1])
    index = torch.randint(len(flat), flat.shape, generator=generator, device=generator.device)
    return centred(flat.gather(0, index.to(flat.device)).reshape(scores_DSE.shape))


def null_ratio(
    scores_DSE: Float[Tensor, "D S E"],
    top_k: int,
    quantity: str,
    *,
    scope: str,
    generator: torch.Generator,
    num_shuffles: int = 20,
    num_bootstraps: int = 200,
) -> NullRatio | None:
    """ρ, ρ_ref and ρ_cal of the margin r_(1) − r_(k), or of the selection gap r_(k) − r_(k+1).

    ρ = observed mean / median over shuffles of the mean, where a shuffle permutes each expert's column of the
    per-token-centred scores. Centring alone makes ρ of scores without structure differ from 1: sqrt(E/(E − 1))
    for normal ones. ρ_ref measures that on a surrogate; ρ_cal = ρ/ρ_ref. Bounded scores are not calibrated.

    Args:
        scores_DSE: choice scores; D documents of S tokens.
        top_k: k.
        quantity: which difference.
        scope: permute over all tokens ("batch") or within a document; there is no default, since the two
            answer different questions: the second keeps what a document as a whole prefers.
        generator: the only source of randomness.
        num_shuffles: shuffles of the scores, and as many of the surrogate.
        num_bootstraps: resamples of documents for the interval.

    Returns:
        None where the quantity does not exist: margin at k = 1, gap at k = E.

    Raises:
        MetricInputError: an unknown scope or quantity.
    """
    if scope not in get_args(Scope) or quantity not in get_args(Quantity):
        raise MetricInputError(
            f"scope is {scope!r} and quantity {quantity!r}, expected one of {get_args(Scope)} and one of "
            f"{get_args(Quantity)}"
        )
    num_experts = scores_DSE.shape[-1]
    if (quantity == "margin" and top_k == 1) or (quantity == "selection_gap" and top_k == num_experts):
        return None
    scores_DSE = centred(scores_DSE)
    observed_D = _per_document(scores_DSE, top_k, quantity)
    null_ND = _null(scores_DSE, top_k, quantity, scope, generator, num_shuffles)
    surrogate = resampled(scores_DSE, generator)
    reference = _per_document(surrogate, top_k, quantity).mean() / _median_mean(
        _null(surrogate, top_k, quantity, scope, generator, num_shuffles)
    )
    observed, null = float(observed_D.mean()), float(_median_mean(null_ND))
    # A router that starts at zero, or one whose experts all collapsed onto each other, has scores without spread.
    rho, rho_ref = observed / null if null else math.nan, float(reference)
    rho_cal = rho / rho_ref if rho_ref else math.nan
    if len(observed_D) < MIN_DOCUMENTS:
        return NullRatio(observed, null, rho, rho_ref, rho_cal, None, None)
    # Documents are drawn anew, observed and null alike; the reference is a property of E, k and the columns.
    draws = torch.randint(
        len(observed_D), (num_bootstraps, len(observed_D)), generator=generator, device=generator.device
    ).to(observed_D.device)
    null_B = torch.stack([_median_mean(null_ND[:, draw]) for draw in draws])
    ratio = observed_D[draws].mean(1) / null_B / rho_ref
    low, high = torch.quantile(ratio, torch.tensor([0.025, 0.975], dtype=ratio.dtype, device=ratio.device))
    return NullRatio(observed, null, rho, rho_ref, rho_cal, float(low), float(high))


def cell_of(margin: NullRatio | None, gap: NullRatio | None) -> Cell | None:
    """The four readings of a visit: is the choice's inside steep, is its edge sharp, beyond chance?

    Beyond chance is an interval of ρ_cal above 1 + `CALIBRATION_TOLERANCE`. Neither: under-specialised. The
    gap alone: a block of equals that is clearly chosen. The margin alone: a hierarchy without an edge. Both:
    strong. None where one of the two does not exist, has no interval or is not finite.
    """
    if margin is None or gap is None or margin.low is None or gap.low is None:
        return None
    if not math.isfinite(margin.low) or not math.isfinite(gap.low):
        return None
    steep, sharp = (low > 1 + CALIBRATION_TOLERANCE for low in (margin.low, gap.low))
    if steep:
        return "strong" if sharp else "hierarchical"
    return "block" if sharp else "under-specialised"


def _difference(scores: Tensor, top_k: int, quantity: str) -> Tensor:
    top = scores.topk(min(top_k + 1, scores.shape[-1]), dim=-1).values
    if quantity == "margin":
        return top[..., 0] - top[..., top_k - 1]
    return top[..., top_k - 1] - top[..., top_k]


def _per_document(scores_DSE: Tensor, top_k: int, quantity: str) -> Tensor:
    return _difference(scores_DSE, top_k, quantity).double().mean(1)


def _null(
    scores_DSE: Tensor, top_k: int, quantity: str, scope: str, generator: torch.Generator, times: int
) -> Tensor:
    return torch.stack(
        [_per_document(shuffled(scores_DSE, scope, generator), top_k, quantity) for _ in range(times)]
    )


def _median_mean(null_ND: Tensor) -> Tensor:
    return null_ND.mean(1).median()
