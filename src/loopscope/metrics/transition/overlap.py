"""How much of the expert sets two visits of one physical layer share, beside what chance would give."""

from math import comb

import numpy as np
import torch
from torch import Tensor

from loopscope.metrics.context import PairContext
from loopscope.metrics.family import Family, FoundColumns, Masked, Partials, Slot, SlotTensors, absent

_NO_CHOICE = absent("no chosen experts handed over")
_NO_COUNTS = absent("no expert counts handed over")


def jaccard_chance(num_experts: int, top_k: int) -> float:
    """Expected Jaccard index of two independent uniform k-subsets of E: Σ_m Hypergeom(m)·m/(2k − m).

    >>> round(jaccard_chance(8, 2), 4)
    0.1786
    """
    ways = comb(num_experts, top_k)
    return sum(
        comb(top_k, m) * comb(num_experts - top_k, top_k - m) / ways * (m / (2 * top_k - m))
        for m in range(1, top_k + 1)
    )


def _membership(idx_NK: Tensor, num_experts: int) -> Tensor:
    """[N, E] bool, True for chosen experts. Writes of one constant: the same bits in any order."""
    safe_NK = idx_NK.clamp(0, num_experts - 1)
    chosen = (idx_NK == safe_NK).to(torch.uint8)
    empty = torch.zeros(idx_NK.shape[0], num_experts, dtype=torch.uint8, device=idx_NK.device)
    return empty.scatter_reduce(1, safe_NK, chosen, "amax")


def _partial(c: PairContext) -> SlotTensors:
    a, b = c.tensors.from_topk_idx, c.tensors.to_topk_idx
    if a is None or b is None:
        zero = torch.zeros_like(c.tokens)
        return {"overlap_tokens": zero, "overlap": zero, "jaccard": zero}
    a_NK, b_NK = (x.reshape(-1, x.shape[-1]).long() for x in (a, b))
    if c.top_k**2 <= 4 * c.num_experts:  # whichever intermediate is smaller
        shared_N = (a_NK[:, :, None] == b_NK[:, None, :]).any(-1).sum(-1)
    else:
        shared_N = (_membership(a_NK, c.num_experts) & _membership(b_NK, c.num_experts)).sum(-1)
    return {
        "overlap_tokens": c.tokens,
        "overlap": c.total(shared_N / c.top_k),
        "jaccard": c.total(shared_N / (2 * c.top_k - shared_N)),
    }


def _finish(p: Partials) -> FoundColumns:
    missing = ((p.number("overlap_tokens") == 0) & (p.tokens > 0), _NO_CHOICE)
    a, b = (count / count.sum(1, keepdims=True) for count in p.counts)
    unknown = (np.isnan(np.hstack(p.counts)).sum(1) > 0, _NO_COUNTS)
    return {
        "topk_overlap": Masked(p.mean("overlap", "overlap_tokens"), missing),
        "topk_jaccard": Masked(p.mean("jaccard", "overlap_tokens"), missing),
        "load_overlap": Masked(np.minimum(a, b).sum(1), missing, unknown),
        "overlap_chance": p.top_k / p.num_experts,
        "jaccard_chance": jaccard_chance(p.num_experts, p.top_k),
    }


FAMILY: Family[PairContext] = Family(
    module=__name__,
    sums=(Slot("overlap_tokens"), Slot("overlap"), Slot("jaccard")),
    partial=_partial,
    finish=_finish,
)
