"""Margin among the chosen, r_(1) − r_(k), of the choice scores r in falling order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.histogram import histogram, quantile
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Kind, Metric, Slot
from loopscope.metrics.partials import Partials

_COLUMNS = ("margin_mean", "margin_min", "margin_hist", "margin_p25", "margin_p50", "margin_p75")


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    first_N, kth_N, _ = c.leading_N
    margin_N = first_N - kth_N
    return {
        "margin": c.total(margin_N),
        "margin_neg_min": c.highest(-margin_N),
        "margin_hist": histogram(torch.nan_to_num(margin_N), c.valid_N),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
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


def _metric(name: str, formula: str, merge: str, unit: str = "score", kind: Kind = "float64") -> Metric:
    return Metric(
        name=name,
        table="router",
        kind=kind,
        formula=formula,
        unit=unit,
        needs=("choice_scores",),
        merge=merge,
        source="definition; r = selection_scores where given, else raw logits (score_space says which)",
        null_rule="k = 1: not_applicable; non-finite score: nonfinite; no valid token: absent",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("margin_mean", "mean_t (r_(1) − r_(k))", "sum"),
        _metric("margin_min", "min_t (r_(1) − r_(k))", "max of negative"),
        _metric("margin_hist", "tokens per half-octave bin of r_(1) − r_(k)", "sum", "tokens", "list<int64>"),
        _metric("margin_p25", "25% quantile from margin_hist, error within one bin", "from margin_hist"),
        _metric("margin_p50", "median from margin_hist, error within one bin", "from margin_hist"),
        _metric("margin_p75", "75% quantile from margin_hist, error within one bin", "from margin_hist"),
    ),
    sums=(Slot("margin"), Slot("margin_hist", "bins")),
    maxima=(Slot("margin_neg_min"),),
    partial=_partial,
    finish=_finish,
)
"""Margin among the chosen."""
