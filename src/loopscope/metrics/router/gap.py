"""Selection gap r_(k) − r_(k+1): how nearly another expert set would have been chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.histogram import histogram, quantile
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Kind, Metric, Slot
from loopscope.metrics.partials import Partials

_COLUMNS = ("selection_gap_mean", "selection_gap_min", "selection_gap_hist", "selection_gap_p01")


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    # At k = E there is no next expert; the slot is filled with zeros and the columns are not_applicable.
    _, kth_N, next_N = c.leading_N
    gap_N = kth_N - next_N
    return {
        "gap": c.total(gap_N),
        "gap_neg_min": c.highest(-gap_N),
        "gap_hist": histogram(torch.nan_to_num(gap_N), c.valid_N),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    if p.top_k == p.num_experts:
        return dict.fromkeys(_COLUMNS, NOT_APPLICABLE)
    return {
        "selection_gap_mean": p.mean("gap"),
        "selection_gap_min": -p.number("gap_neg_min"),
        "selection_gap_hist": p["gap_hist"],
        "selection_gap_p01": quantile(p["gap_hist"], 0.01),
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
        null_rule="k = E: not_applicable; non-finite score: nonfinite; no valid token: absent",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("selection_gap_mean", "mean_t (r_(k) − r_(k+1))", "sum"),
        _metric("selection_gap_min", "min_t (r_(k) − r_(k+1))", "max of negative"),
        _metric(
            "selection_gap_hist",
            "tokens per half-octave bin of r_(k) − r_(k+1)",
            "sum",
            "tokens",
            "list<int64>",
        ),
        _metric(
            "selection_gap_p01",
            "1% quantile from selection_gap_hist, error within one bin",
            "from selection_gap_hist",
        ),
    ),
    sums=(Slot("gap"), Slot("gap_hist", "bins")),
    maxima=(Slot("gap_neg_min"),),
    partial=_partial,
    finish=_finish,
)
"""Selection gap."""
