"""The scores that decide a choice: r_(1), r_(k) and r_(k+1) of each token, r in falling order."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_MAX_LEVELS = 17


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
