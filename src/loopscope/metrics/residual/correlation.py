"""Mean cosine between the tokens of a sequence: 1 when all are alike, about 0 for independent directions."""

import numpy as np

from loopscope.metrics.context import VisitContext
from loopscope.metrics.dense import TINY
from loopscope.metrics.family import (
    NOT_APPLICABLE,
    Family,
    FoundColumns,
    Masked,
    Partials,
    Slot,
    SlotTensors,
    absent,
)

_SHARDED = absent("sequence is sharded over ranks")
_COLUMNS = ("token_correlation", "token_correlation_excluded", "token_correlation_pairs")


def _partial(c: VisitContext) -> SlotTensors:
    batch, seq = c.tensors.residual.shape[:2]
    excluded_N = c.norm_N < TINY
    counted_N = c.keep((~excluded_N).double())
    per_seq_B = counted_N.reshape(batch, seq).sum(1)
    return {
        "pair_cosine": (c.rows.unit_sum_BD.square().sum(1) - per_seq_B).sum(),
        "pairs": (per_seq_B * (per_seq_B - 1)).sum(),
        "correlation_excluded": c.total(excluded_N.float()),
    }


def _finish(p: Partials) -> FoundColumns:
    if p.sequence_sharded:
        return dict.fromkeys(_COLUMNS, _SHARDED)
    pairs = p.number("pairs")
    value = np.where(pairs > 0, p.number("pair_cosine") / pairs, np.nan)
    return {
        "token_correlation": Masked(value, ((p.tokens > 0) & ~(pairs > 0), NOT_APPLICABLE)),
        "token_correlation_excluded": p.number("correlation_excluded"),
        "token_correlation_pairs": pairs,
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("pair_cosine"), Slot("pairs"), Slot("correlation_excluded")),
    partial=_partial,
    finish=_finish,
)
