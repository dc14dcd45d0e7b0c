"""Margin among the chosen, r_(1) − r_(k), of the choice scores r in falling order."""

from __future__ import annotations

import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Partials, Slot, SlotTensors
from loopscope.metrics.histogram import histogram, quantile

_COLUMNS = ("margin_mean", "margin_min", "margin_hist", "margin_p25", "margin_p50", "margin_p75")


def _partial(c: VisitContext) -> SlotTensors:
    first_N, kth_N, _ = c.leading_N
    margin_N = first_N - kth_N
    return {
        "margin": c.total(margin_N),
        "margin_neg_min": c.highest(-margin_N),
        "margin_hist": histogram(torch.nan_to_num(margin_N), c.valid_N),
    }


def _finish(p: Partials) -> FoundColumns:
    if p.top_k == 1:
        return dict.fromkeys(_COLUMNS, NOT_APPLICABLE)
    hist = p["margin_hist"]
    return {
        "margin_mean": p.mean("margin"),
        "margin_min": -p.number("margin_neg_min"),
        "margin_hist": hist,
        "margin_p25": quantile(hist, 0.25),
        "margin_p50": quantile(hist, 0.5),
        "margin_p75": quantile(hist, 0.75),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("margin"), Slot("margin_hist", "bins")),
    maxima=(Slot("margin_neg_min"),),
    partial=_partial,
    finish=_finish,
)
