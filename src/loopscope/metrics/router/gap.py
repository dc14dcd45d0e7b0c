"""Selection gap r_(k) − r_(k+1): how nearly another expert set would have been chosen."""

from __future__ import annotations

import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Partials, Slot, SlotTensors
from loopscope.metrics.histogram import histogram, quantile

_COLUMNS = ("selection_gap_mean", "selection_gap_min", "selection_gap_hist", "selection_gap_p01")


def _partial(c: VisitContext) -> SlotTensors:
    # At k = E there is no next expert; the slot is filled with zeros and the columns are not_applicable.
    _, kth_N, next_N = c.leading_N
    gap_N = kth_N - next_N
    return {
        "gap": c.total(gap_N),
        "gap_neg_min": c.highest(-gap_N),
        "gap_hist": histogram(torch.nan_to_num(gap_N), c.valid_N),
    }


def _finish(p: Partials) -> FoundColumns:
    if p.top_k == p.num_experts:
        return dict.fromkeys(_COLUMNS, NOT_APPLICABLE)
    return {
        "selection_gap_mean": p.mean("gap"),
        "selection_gap_min": -p.number("gap_neg_min"),
        "selection_gap_hist": p["gap_hist"],
        "selection_gap_p01": quantile(p["gap_hist"], 0.01),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("gap"), Slot("gap_hist", "bins")),
    maxima=(Slot("gap_neg_min"),),
    partial=_partial,
    finish=_finish,
)
