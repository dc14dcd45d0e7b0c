"""How many experts two visits of one physical layer share, token by token, as exact counts."""

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from loopscope.metrics.family import Null, absent
from loopscope.metrics.transition.overlap import jaccard_chance

COLUMNS = ("topk_overlap", "topk_jaccard", "load_overlap", "overlap_chance", "jaccard_chance")
"""What `finish_shared` gives."""


def shared_counts(a_NK: Int[Tensor, "N k"], b_NK: Int[Tensor, "N k"]) -> Int[Tensor, " m"]:
    """Tokens by the number of experts that both visits chose: entry m counts tokens with |S_a ∩ S_b| = m.

    Integers that merge by addition, from which overlap and Jaccard follow exactly. No device sync.

    Args:
        a_NK: chosen experts of the first visit [N, k], distinct within a token.
        b_NK: of the second visit of the same layer.

    Returns:
        int64 [k + 1] on the same device.
    """
    top_k = a_NK.shape[-1]
    shared_N = torch.zeros(a_NK.shape[0], dtype=torch.int64, device=a_NK.device)
    for column in range(top_k):  # one [N, k] comparison at a time, whatever k is
        shared_N += (b_NK == a_NK[:, column : column + 1]).any(-1)
    return torch.zeros(top_k + 1, dtype=torch.int64, device=a_NK.device).scatter_add(
        0, shared_N, torch.ones_like(shared_N)
    )


def finish_shared(
    counts_m: NDArray[np.float64],
    num_experts: int,
    *,
    from_count: NDArray[np.float64] | None,
    to_count: NDArray[np.float64] | None,
) -> dict[str, float | Null]:
    """Overlap of two visits from their shared counts.

    mean_t |S_a ∩ S_b|/k, mean_t |S_a ∩ S_b|/|S_a ∪ S_b|, Σ_e min(f_a, f_b), and what independent uniform
    choices would give.

    Args:
        counts_m: from `shared_counts`, merged; [k + 1].
        num_experts: E.
        from_count: assignments per expert of the first visit [E]; None where they are not known.
        to_count: of the second.
    """
    top_k = len(counts_m) - 1
    shared = np.arange(top_k + 1)
    tokens = counts_m.sum()
    found: dict[str, float | Null] = dict.fromkeys(COLUMNS[:3], absent("no valid token"))
    if tokens > 0:
        found["topk_overlap"] = float((counts_m * shared).sum() / (tokens * top_k))
        found["topk_jaccard"] = float((counts_m * (shared / (2 * top_k - shared))).sum() / tokens)
        if from_count is None or to_count is None:
            found["load_overlap"] = absent("no expert counts")
        else:
            found["load_overlap"] = float(
                np.minimum(from_count / from_count.sum(), to_count / to_count.sum()).sum()
            )
    found["overlap_chance"] = top_k / num_experts
    found["jaccard_chance"] = jaccard_chance(num_experts, top_k)
    return found
