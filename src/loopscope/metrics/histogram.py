"""Histograms of score differences, and quantiles from them; the bins are `catalog.bins`."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from loopscope.catalog.bins import EDGES, NUM_BINS, OFFSET


def histogram(diff_N: Float[Tensor, " N"], valid_N: Bool[Tensor, " N"] | None) -> Int[Tensor, " bins"]:
    """Counts of non-negative differences per bin, valid tokens only; integer, hence deterministic."""
    position = torch.floor(2 * torch.log2(diff_N)) + OFFSET
    bin_N = torch.nan_to_num(position, nan=0.0).clamp(0, NUM_BINS - 1).long()
    weight_N = torch.ones_like(bin_N) if valid_N is None else valid_N.long()
    return torch.zeros(NUM_BINS, dtype=torch.int64, device=diff_N.device).scatter_add(0, bin_N, weight_N)


def quantile(counts: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """Quantile q of what each of V histograms counted, linear within its bin, so its error is within one bin.

    In the last, open bin the lower edge is returned. NaN where nothing was counted.

    Args:
        counts: [V, bins].
        q: in [0, 1].

    Returns:
        [V].
    """
    cumulative = np.cumsum(counts, axis=1)
    rank = q * cumulative[:, -1]
    # The first bin that is not empty and reaches the rank.
    bin_V = np.argmax((cumulative >= rank[:, None]) & (counts > 0), axis=1)
    at = np.arange(len(counts))
    count, low, high = counts[at, bin_V], EDGES[bin_V], EDGES[bin_V + 1]
    width = np.where(np.isfinite(high), high - low, 0.0)
    inside = (rank - (cumulative[at, bin_V] - count)) / np.where(count > 0, count, 1.0)
    return np.where(cumulative[:, -1] > 0, low + width * inside, np.nan)
