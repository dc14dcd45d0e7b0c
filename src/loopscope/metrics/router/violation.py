"""How far the most loaded, the least loaded and the average expert are from balance: u_e = E·f_e."""

import numpy as np
import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import EMPTY, Family, Floats, FoundColumns, Partials, Slot, SlotTensors


def relative_load(load: Floats) -> Floats:
    """u = load over its mean, [V, E] → [V, E]; NaN where nothing was loaded."""
    mean = load.mean(1, keepdims=True)
    return load / np.where(mean > 0, mean, np.nan)


def max_violation(load: Floats) -> Floats:
    """max u − 1, [V, E] → [V]."""
    found: Floats = relative_load(load).max(1) - 1
    return found


def _partial(c: VisitContext) -> SlotTensors:
    count_E = c.count_E.double()
    violation = c.num_experts * count_E.max() / count_E.sum().clamp(min=1.0) - 1.0
    return {
        "maxvio_tokens": violation * c.tokens,
        # A rank's own value exists once its microbatches are merged; see reduce.seal_rank.
        "maxvio_rank": torch.full_like(violation, EMPTY),
    }


def _finish(p: Partials) -> FoundColumns:
    u = relative_load(p["count"])
    highest, over_ranks = u.max(1) - 1, p.number("maxvio_rank")
    return {
        "maxvio_count": highest,
        "minvio_count": u.min(1) - 1,
        "avgvio_count": np.abs(u - 1).mean(1),
        "maxvio_micro_mean": p.mean("maxvio_tokens"),
        "maxvio_rank_max": np.where(np.isfinite(over_ranks), over_ranks, highest),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("maxvio_tokens"),),
    maxima=(Slot("maxvio_rank"),),
    partial=_partial,
    finish=_finish,
)
