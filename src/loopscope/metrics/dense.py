"""Small pieces that several reductions share."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

_ROWS = 16
"""Tokens that one step of a sum over tokens takes together."""


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
