"""Size of a block's output."""

import numpy as np

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import Family, FoundColumns, Partials, Slot, SlotTensors


def _partial(c: VisitContext) -> SlotTensors:
    rows = c.rows
    return {
        "norm": c.total(c.norm_N),
        # The mean square per token, so that d need not be known when the sums are finished.
        "mean_square": c.total(rows.square_N / c.tensors.residual.shape[-1]),
        "abs_max": c.highest(rows.abs_max_N),
        "nonfinite_residual": c.total(rows.bad_N),
    }


def _finish(p: Partials) -> FoundColumns:
    return {
        "norm_mean": p.mean("norm"),
        "rms": np.sqrt(p.mean("mean_square")),
        "abs_max": p.number("abs_max"),
        "nonfinite_count": p.number("nonfinite_residual"),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("norm"), Slot("mean_square"), Slot("nonfinite_residual")),
    maxima=(Slot("abs_max"),),
    partial=_partial,
    finish=_finish,
)
