"""Combine-weight mass per expert: m_e = Σ_t w_te, and its largest violation beside that of the counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Metric, Slot
from loopscope.metrics.partials import Partials
from loopscope.metrics.router.violation import max_violation

_SCALE = 2.0**36
_LIMIT = 2.0**10
_BALANCED = 1e-6


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    # Fixed point: integer addition gives the same bits in any order, float scatter-add on a GPU does not.
    # 2^-36 per assignment is far below the column's float32; 2^17 assignments of weight 2^10 still fit.
    weight = torch.where(c.counted_NK, c.weights_NK, torch.zeros_like(c.weights_NK))
    fixed = torch.round(torch.nan_to_num(weight).clamp(-_LIMIT, _LIMIT).double() * _SCALE).long()
    return {"mass": c.scatter(fixed).double() / _SCALE}


def _finish(p: Partials) -> Mapping[str, Any]:
    if p.tokens > 0 and p["mass"].sum() == 0.0:
        # Every weight is 0, as where a sigmoid router's probabilities underflow: no share, and nothing non-finite.
        return {
            "expert_mass": p["mass"],
            **dict.fromkeys(("maxvio_mass", "mass_to_count_ratio"), NOT_APPLICABLE),
        }
    violation_mass, violation_count = max_violation(p["mass"]), max_violation(p["count"])
    return {
        "expert_mass": p["mass"],
        "maxvio_mass": violation_mass,
        "mass_to_count_ratio": NOT_APPLICABLE
        if violation_count < _BALANCED
        else violation_mass / violation_count,
    }


def _metric(name: str, kind: str, formula: str, unit: str, merge: str, null_rule: str, **more: Any) -> Metric:
    return Metric(
        name=name,
        table="router",
        kind=kind,  # type: ignore[arg-type]
        formula=formula,
        unit=unit,
        needs=("topk_idx", "topk_weights"),
        merge=merge,
        source="MaxVio of Wang et al. 2024, arXiv 2408.15664, on combine weights instead of counts",
        null_rule=null_rule,
        **more,
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric(
            "expert_mass",
            "list<float32>",
            "m_e = Σ_t w_te",
            "tokens",
            "sum",
            "non-finite weight: nonfinite; zeros where there is no valid token",
            empty_is_value=True,
        ),
        _metric(
            "maxvio_mass",
            "float64",
            "max_e E·m_e/Σm − 1",
            "1",
            "from expert_mass",
            "non-finite weight: nonfinite; no weight above 0: not_applicable; no valid token: absent",
        ),
        _metric(
            "mass_to_count_ratio",
            "float64",
            "maxvio_mass / maxvio_count",
            "1",
            "from expert_mass, expert_count",
            "maxvio_count < 1e-6 or no weight above 0: not_applicable; non-finite weight: nonfinite; "
            "no valid token: absent",
        ),
    ),
    sums=(Slot("mass", "E"),),
    partial=_partial,
    finish=_finish,
)
"""Combine-weight mass."""
