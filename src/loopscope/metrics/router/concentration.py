"""How much probability the best expert and the chosen experts have."""

import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import Family, FoundColumns, Partials, Slot, SlotTensors


def _partial(c: VisitContext) -> SlotTensors:
    chosen_NK = c.probs_NE.gather(1, c.idx_NK)
    if c.open_choice:
        chosen_NK = torch.where(c.in_range_NK, chosen_NK, 0.0)
    return {"top1_prob": c.total(c.probs_NE.amax(-1)), "topk_mass": c.total(chosen_NK.sum(-1))}


def _finish(p: Partials) -> FoundColumns:
    return {"top1_prob_mean": p.mean("top1_prob"), "topk_mass_mean": p.mean("topk_mass")}


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("top1_prob"), Slot("topk_mass")),
    partial=_partial,
    finish=_finish,
)
