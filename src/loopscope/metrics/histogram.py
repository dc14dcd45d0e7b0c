"""The one histogram of score differences: fixed half-octave bins, so that counts merge by addition.

Bin 0 holds [0, 2^-16), bin i (1 <= i <= 62) holds [2^((i-33)/2), 2^((i-32)/2)), bin 63 holds [2^15, inf). A
difference within one unit in the last place of an edge may fall on either side of it.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

NUM_BINS = 64
_OFFSET = 33

EDGES: NDArray[np.float64] = np.concatenate(
    [[0.0], 2.0 ** ((np.arange(1, NUM_BINS) - _OFFSET) / 2), [np.inf]]
)
"""[NUM_BINS + 1] bin edges; bin i is [EDGES[i], EDGES[i+1])."""


def histogram(diff_N: Float[Tensor, " N"], valid_N: Bool[Tensor, " N"] | None) -> Int[Tensor, " bins"]:
    """Counts of non-negative differences per bin, valid tokens only; integer, hence deterministic."""
    position = torch.floor(2 * torch.log2(diff_N)) + _OFFSET
    bin_N = torch.nan_to_num(position, nan=0.0).clamp(0, NUM_BINS - 1).long()
    weight_N = torch.ones_like(bin_N) if valid_N is None else valid_N.long()
    return torch.zeros(NUM_BINS, dtype=torch.int64, device=diff_N.device).scatter_add(0, bin_N, weight_N)


def quantile(counts: NDArray[np.float64], q: float) -> float:
    """Quantile q of the counted values, linear within its bin, so its error is within one bin.

    In the last, open bin the lower edge is returned. NaN where nothing was counted.
    """
    total = counts.sum()
    if not total > 0:
        return float("nan")
    rank = q * total
    cumulative = np.cumsum(counts)
    i = int(np.searchsorted(cumulative, rank, side="left"))
    while counts[i] == 0:  # q = 0 lands on a leading empty bin
        i += 1
    low, high = EDGES[i], EDGES[i + 1]
    if not np.isfinite(high):
        return float(low)
    inside = (rank - (cumulative[i] - counts[i])) / counts[i]
    return float(low + (high - low) * inside)
