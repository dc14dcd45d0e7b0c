"""How many tokens and microbatches a vector stands for. No column of its own: `num_tokens` is a row key."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from loopscope.metrics.context import PairContext, VisitContext
from loopscope.metrics.family import Family, Slot


def _partial(c: VisitContext | PairContext) -> Mapping[str, Tensor]:
    return {"tokens": c.tokens, "filled": (c.tokens > 0).double()}


VISIT: Family[VisitContext] = Family(module=__name__, sums=(Slot("tokens"), Slot("filled")), partial=_partial)
"""`tokens` = T; `filled` = microbatches with a valid token."""

PAIR: Family[PairContext] = Family(module=__name__, sums=(Slot("tokens"), Slot("filled")), partial=_partial)
"""The same for a pair."""
