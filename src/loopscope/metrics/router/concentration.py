"""How much probability the best expert and the chosen experts have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import Family, Metric, Slot
from loopscope.metrics.partials import Partials


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    chosen_NK = c.probs_NE.gather(1, c.idx_NK)
    return {"top1_prob": c.total(c.probs_NE.amax(-1)), "topk_mass": c.total(chosen_NK.sum(-1))}


def _finish(p: Partials) -> Mapping[str, Any]:
    return {"top1_prob_mean": p.mean("top1_prob"), "topk_mass_mean": p.mean("topk_mass")}


def _metric(name: str, formula: str, needs: tuple[str, ...]) -> Metric:
    return Metric(
        name=name,
        table="router",
        kind="float64",
        formula=formula,
        unit="1",
        needs=needs,
        merge="sum",
        source="definition",
        null_rule="non-finite probability: nonfinite; no valid token: absent",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("top1_prob_mean", "mean_t max_e p_te", ("router_probs",)),
        _metric("topk_mass_mean", "mean_t Σ_{e in S_t} p_te", ("router_probs", "topk_idx")),
    ),
    sums=(Slot("top1_prob"), Slot("topk_mass")),
    partial=_partial,
    finish=_finish,
)
"""Probability of the best and of the chosen."""
