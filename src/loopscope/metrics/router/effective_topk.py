"""How many of a token's chosen experts count: the participation ratio of its combine weights, 1 to k."""

from loopscope.metrics.context import VisitContext
from loopscope.metrics.dense import safe_ratio
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Partials, Slot, SlotTensors


def _partial(c: VisitContext) -> SlotTensors:
    ratio_N, excluded_N = safe_ratio(c.weights_NK.sum(-1).square(), c.weights_NK.square().sum(-1))
    return {"effective_topk": c.total(ratio_N), "effective_topk_excluded": c.total(excluded_N.float())}


def _finish(p: Partials) -> FoundColumns:
    if p.top_k == 1:
        return dict.fromkeys(("effective_topk_mean", "effective_topk_excluded"), NOT_APPLICABLE)
    return {
        "effective_topk_mean": p.mean_without("effective_topk", "effective_topk_excluded"),
        "effective_topk_excluded": p.number("effective_topk_excluded"),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("effective_topk"), Slot("effective_topk_excluded")),
    partial=_partial,
    finish=_finish,
)
