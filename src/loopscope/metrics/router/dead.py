"""Experts without a token, beside how many a balanced router would leave without one by chance; and assignments that
were asked for and did not run."""

import numpy as np
import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Masked, Partials, Slot, SlotTensors


def _partial(c: VisitContext) -> SlotTensors:
    dropped = c.tensors.dropped
    return {"dropped": torch.zeros_like(c.tokens) if dropped is None else c.total(dropped.reshape(-1))}


def _finish(p: Partials) -> FoundColumns:
    return {
        "dead_experts": np.count_nonzero(p["count"] == 0, axis=1),
        "dead_expected": p.num_experts * (1 - p.top_k / p.num_experts) ** p.tokens,
        "dropped_assignments": Masked(p.number("dropped"), (~p.has("drops"), NOT_APPLICABLE)),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("dropped"),),
    partial=_partial,
    finish=_finish,
)
