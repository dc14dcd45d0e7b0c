"""The Switch load-balancing loss, E·Σ_e f_e·P_e, from merged loads and as the mean over microbatches."""

import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import Family, FoundColumns, Partials, Slot, SlotTensors


def _partial(c: VisitContext) -> SlotTensors:
    count_E = c.count_E.double()
    own = c.num_experts * (count_E * c.prob_sum_E).sum() / (count_E.sum() * c.tokens).clamp(min=1.0)
    return {"prob": c.prob_sum_E, "lb_micro": torch.where(c.tokens > 0, own, torch.zeros_like(own))}


def _finish(p: Partials) -> FoundColumns:
    f = p["count"] / p["count"].sum(1, keepdims=True)
    mean_prob = p["prob"] / p.tokens[:, None]
    return {
        "mean_prob": mean_prob,
        "lb_loss": p.num_experts * (f * mean_prob).sum(1),
        "lb_loss_micro_mean": p.mean("lb_micro", "filled"),
        "filled_microbatches": p.number("filled"),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("prob", "E"), Slot("lb_micro")),
    partial=_partial,
    finish=_finish,
)
