"""Experts without a token, beside how many a balanced router would leave without one by chance."""

import numpy as np

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Partials


def _finish(p: Partials) -> FoundColumns:
    return {
        "dead_experts": np.count_nonzero(p["count"] == 0, axis=1),
        "dead_expected": p.num_experts * (1 - p.top_k / p.num_experts) ** p.tokens,
        "dropped_assignments": NOT_APPLICABLE,
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    finish=_finish,
)
