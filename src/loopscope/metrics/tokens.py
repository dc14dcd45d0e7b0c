"""How many tokens and microbatches a vector stands for. No column of its own: `num_tokens` is a row key."""

from loopscope.metrics.context import PairContext, VisitContext
from loopscope.metrics.family import Family, Slot, SlotTensors


def _partial(c: VisitContext | PairContext) -> SlotTensors:
    return {"tokens": c.tokens, "filled": (c.tokens > 0).double()}


FAMILY: Family[VisitContext | PairContext] = Family(
    module=__name__,
    sums=(Slot("tokens"), Slot("filled")),
    partial=_partial,
)
"""`tokens` = T; `filled` = microbatches with a valid token. Of a visit, and of a pair of visits."""
