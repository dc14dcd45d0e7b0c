"""Combine-weight mass per expert: m_e = Σ_t w_te, and its largest violation beside that of the counts."""

import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Masked, Partials, Slot, SlotTensors
from loopscope.metrics.router.violation import max_violation

_SCALE = 2.0**36
_LIMIT = 2.0**10
_BALANCED = 1e-6


def _partial(c: VisitContext) -> SlotTensors:
    # Fixed point: integer addition gives the same bits in any order, float scatter-add on a GPU does not.
    # 2^-36 per assignment is far below the column's float32; 2^17 assignments of weight 2^10 still fit.
    weight = torch.where(c.counted_NK, c.weights_NK, torch.zeros_like(c.weights_NK))
    fixed = torch.round(torch.nan_to_num(weight).clamp(-_LIMIT, _LIMIT).double() * _SCALE).long()
    return {"mass": c.scatter(fixed).double() / _SCALE}


def _finish(p: Partials) -> FoundColumns:
    mass = p["mass"]
    violation_mass, violation_count = max_violation(mass), max_violation(p["count"])
    # Every weight is 0, as where a sigmoid router's probabilities underflow: no share, and nothing non-finite.
    weightless = ((p.tokens > 0) & (mass.sum(1) == 0.0), NOT_APPLICABLE)
    balanced = (violation_count < _BALANCED, NOT_APPLICABLE)
    return {
        "expert_mass": mass,
        "maxvio_mass": Masked(violation_mass, weightless),
        "mass_to_count_ratio": Masked(violation_mass / violation_count, weightless, balanced),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("mass", "E"),),
    partial=_partial,
    finish=_finish,
)
