"""Counters that say whether the input is what the contract promises; `faults` judges them. No column."""

import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import Family, Slot, SlotTensors

_HALF = (torch.float16, torch.bfloat16)


def tolerance(dtype: torch.dtype) -> float:
    """How far a sum of probabilities in this type may be from 1: 1e-4, and 1e-2 for half types."""
    return 1e-2 if dtype in _HALF else 1e-4


def _partial(c: VisitContext) -> SlotTensors:
    logits, weights = c.tensors.router_logits, c.tensors.topk_weights
    assert logits is not None
    assert weights is not None
    in_unit_N = (c.logit_min_N >= 0) & (c.logit_max_N <= 1)
    sums_to_one_N = (c.logits_NE.sum(-1) - 1).abs() <= tolerance(logits.dtype)
    # Weights may have been computed in a wider type than the probabilities; a half type anywhere rounds them.
    off_N = (c.weights_NK.sum(-1) - 1).abs() > tolerance(weights.dtype)
    outside_NK = ~c.in_range_NK
    if c.open_choice:
        off_N = off_N & c.in_range_NK.any(-1)
        outside_NK = outside_NK & (c.raw_idx_NK != -1)
    return {
        "prob_like": c.total((in_unit_N & sums_to_one_N).float()),
        "bad_weights": c.total(off_N.float()),
        "bad_index": c.total(outside_NK.sum(-1)),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("prob_like"), Slot("bad_weights"), Slot("bad_index")),
    partial=_partial,
)
