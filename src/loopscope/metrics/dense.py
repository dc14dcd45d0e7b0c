"""Small pieces that several reductions share."""

from math import gcd

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TINY = 1e-12
"""A denominator below this excludes its token."""
_ROWS = 16
"""Tokens that one step of a sum over tokens takes together."""
_MAX_LEVELS = 17


def widen(x: Tensor) -> Tensor:
    """[B, S, F] → [N, F] in float32 or wider."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.dtype == torch.float64 else flat.float()


def down(x: Tensor) -> Tensor:
    """Σ over the middle: [B, N, F] → [B, F], in two steps, so that a compiled loop walks along rows in cache."""
    step = gcd(x.shape[1], _ROWS)
    return x.reshape(x.shape[0], -1, step, x.shape[-1]).sum(2).sum(1)


def bad_entries(x: Tensor, *, fusible: bool) -> Tensor:
    """Non-finite entries per token: [N, F] → [N], as a float (exact up to 2^24 entries).

    A compiler makes one pass of the comparison; eager comparisons are slow (6 times the arithmetic), there NaN is
    made of every non-finite entry and then 1 of every NaN.
    """
    if fusible:
        return torch.where(x.abs() <= torch.finfo(x.dtype).max, 0.0, 1.0).sum(-1)
    return (x - x).nan_to_num_(nan=1.0).sum(-1)


def safe_ratio(
    numerator_N: Float[Tensor, " N"], denominator_N: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """The one rule for a ratio per token: those with a denominator below `TINY` are excluded, and counted.

    Returns:
        The ratios, 0 where excluded, and which tokens are excluded. A NaN denominator stays NaN.
    """
    excluded_N = denominator_N < TINY
    one = torch.ones((), dtype=denominator_N.dtype, device=denominator_N.device)
    zero = torch.zeros((), dtype=numerator_N.dtype, device=numerator_N.device)
    ratio_N = numerator_N / torch.where(excluded_N, one, denominator_N)
    return torch.where(excluded_N, zero, ratio_N), excluded_N


def leading_scores(
    scores_NE: Float[Tensor, "N E"], top_k: int, *, fusible: bool
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """r_(1), r_(k) and r_(k+1) (at k = E: r_(k) again), ties and all.

    Args:
        scores_NE: choice scores.
        top_k: k.
        fusible: find them by passes of comparisons, which a compiler fuses with the other reductions over the
            row, instead of by `torch.topk`, which it cannot. The same values either way.
    """
    following = min(top_k + 1, scores_NE.shape[-1])
    if not fusible or following > _MAX_LEVELS:
        top = torch.topk(scores_NE, following, dim=-1).values
        return top[:, 0], top[:, top_k - 1], top[:, -1]
    return _by_levels(scores_NE, top_k, following)


def _by_levels(scores_NE: Tensor, top_k: int, following: int) -> tuple[Tensor, Tensor, Tensor]:
    # Level i is the i-th largest distinct score. r_(k) is the highest level that k scores reach; each level is
    # reached by one score more at least, so k + 1 levels are enough for both.
    lowest = torch.full((), -torch.inf, dtype=scores_NE.dtype, device=scores_NE.device)
    level_N = first_N = scores_NE.amax(-1)
    kth_N = next_N = level_N
    for i in range(1, following):
        reached_N = (scores_NE >= level_N[:, None]).float().sum(-1)
        level_N = torch.where(scores_NE < level_N[:, None], scores_NE, lowest).amax(-1)
        if i < top_k:
            kth_N = torch.where(reached_N < top_k, level_N, kth_N)
        next_N = torch.where(reached_N < following, level_N, next_N)
    return first_N, kth_N, next_N
