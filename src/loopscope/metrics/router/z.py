"""The router's z_t = logsumexp of the logits, and with it the router z-loss."""

import numpy as np
import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Masked, Partials, Slot, SlotTensors

_COLUMNS = ("z_mean", "z_std", "z_min", "z_max", "z_sq_mean", "z_frac_negative")


def _partial(c: VisitContext) -> SlotTensors:
    # logsumexp, around the maximum that other metrics need as well.
    around_N = torch.nan_to_num(c.logit_max_N)
    z_N = around_N + (c.logits_NE - around_N[:, None]).exp().sum(-1).log()
    return {
        "z": c.total(z_N),
        # Squared in float64: the variance comes from the difference of two merged sums.
        "z_sq": c.keep(z_N).double().square().sum(),
        "z_negative": c.total((z_N < 0).float()),
        "z_max": c.highest(z_N),
        "z_neg_min": c.highest(-z_N),
    }


def _finish(p: Partials) -> FoundColumns:
    mean, square = p.mean("z"), p.mean("z_sq")
    found = {
        "z_mean": mean,
        "z_std": np.sqrt(np.maximum(square - mean**2, 0.0)),
        "z_min": -p.number("z_neg_min"),
        "z_max": p.number("z_max"),
        "z_sq_mean": square,
        "z_frac_negative": p.mean("z_negative"),
    }
    sigmoid = (~p.is_softmax, NOT_APPLICABLE)
    return {name: Masked(value, sigmoid) for name, value in found.items()}


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("z"), Slot("z_sq"), Slot("z_negative")),
    maxima=(Slot("z_max"), Slot("z_neg_min")),
    partial=_partial,
    finish=_finish,
)
