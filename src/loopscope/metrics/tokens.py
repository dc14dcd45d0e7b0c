"""How many tokens and microbatches a vector stands for, and what was unusual. No column of its own: `num_tokens` is a
row key."""

import torch
from torch import Tensor

from loopscope.catalog.traits import NAMES
from loopscope.metrics.context import PairContext, VisitContext
from loopscope.metrics.family import Family, Slot, SlotTensors


def _partial(c: VisitContext | PairContext) -> SlotTensors:
    return {"tokens": c.tokens, "filled": (c.tokens > 0).double(), "traits": _flags(c)}


def _flags(c: VisitContext | PairContext) -> Tensor:
    flags = torch.zeros(len(NAMES), dtype=torch.float64, device=c.tensors.residual.device)
    for name in c.tensors.traits:
        flags[NAMES.index(name)] = 1.0
    return flags


FAMILY: Family[VisitContext | PairContext] = Family(
    module=__name__,
    sums=(Slot("tokens"), Slot("filled"), Slot("traits", "traits")),
    partial=_partial,
)
"""`tokens` = T; `filled` = microbatches with a valid token; `traits` = microbatches of each trait. Of a visit,
and of a pair of visits."""
