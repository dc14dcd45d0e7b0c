"""How successive updates of a loop relate: D_r = h_r − h_{r−1} at one layer against D_{r−1}."""

import torch

from loopscope.metrics.context import PairContext
from loopscope.metrics.dense import TINY, bad_entries, safe_ratio, widen
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Masked, Partials, Slot, SlotTensors

_SLOTS = (
    "update_tokens",
    "update_cosine",
    "update_excluded",
    "acceleration",
    "update_norm",
    "earlier_update_norm",
    "nonfinite_before_residual",
)
_COLUMNS = ("update_cosine", "update_cosine_excluded", "acceleration", "contraction")


def _partial(c: PairContext) -> SlotTensors:
    before = c.tensors.before_residual
    if before is None:
        return dict.fromkeys(_SLOTS, torch.zeros_like(c.tokens))
    before_ND = widen(before)
    earlier_ND = c.from_ND - before_ND
    earlier_norm_N = earlier_ND.square().sum(-1).sqrt()
    cosine_N, excluded_N = safe_ratio((c.delta_ND * earlier_ND).sum(-1), c.delta_norm_N * earlier_norm_N)
    return {
        "update_tokens": c.tokens,
        "update_cosine": c.total(cosine_N),
        "update_excluded": c.total(excluded_N.float()),
        "acceleration": c.total((c.delta_ND - earlier_ND).square().sum(-1).sqrt()),
        "update_norm": c.total(c.delta_norm_N),
        "earlier_update_norm": c.total(earlier_norm_N),
        "nonfinite_before_residual": c.total(bad_entries(before_ND, fusible=c.fusible)),
    }


def _finish(p: Partials) -> FoundColumns:
    first = (p.number("update_tokens") == 0, NOT_APPLICABLE)
    earlier = p.number("earlier_update_norm")
    cosine = p.mean_without("update_cosine", "update_excluded", "update_tokens")
    return {
        "update_cosine": Masked(cosine.values, first, *cosine.nulls),
        "update_cosine_excluded": Masked(p.number("update_excluded"), first),
        "acceleration": Masked(p.mean("acceleration", "update_tokens"), first),
        "contraction": Masked(p.number("update_norm") / earlier, first, (earlier < TINY, NOT_APPLICABLE)),
    }


FAMILY: Family[PairContext] = Family(
    module=__name__,
    sums=tuple(Slot(name) for name in _SLOTS),
    partial=_partial,
    finish=_finish,
)
