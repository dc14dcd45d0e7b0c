"""How many tokens and microbatches a vector stands for. No column of its own: `num_tokens` is a row key."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from loopscope.metrics.context import PairContext, VisitContext
from loopscope.metrics.metric import Family, Slot
from loopscope.metrics.partials import Partials


def _partial(c: VisitContext | PairContext) -> Mapping[str, Tensor]:
    return {"tokens": c.tokens, "filled": (c.tokens > 0).double()}


def _finish(p: Partials) -> Mapping[str, object]:
    return {}


VISIT: Family[VisitContext] = Family(
    metrics=(), sums=(Slot("tokens"), Slot("filled")), partial=_partial, finish=_finish
)
"""`tokens` = T; `filled` = microbatches with a valid token."""

PAIR: Family[PairContext] = Family(
    metrics=(), sums=(Slot("tokens"), Slot("filled")), partial=_partial, finish=_finish
)
"""The same for a pair."""
