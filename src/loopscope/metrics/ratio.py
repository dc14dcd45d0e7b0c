"""The one rule for a ratio per token: tokens with a denominator below 1e-12 are excluded, and counted."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TINY = 1e-12
"""A denominator below this excludes its token."""


def safe_ratio(
    numerator_N: Float[Tensor, " N"], denominator_N: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """Ratio per token, 0 where excluded, and which tokens are excluded. A NaN denominator stays NaN."""
    excluded_N = denominator_N < TINY
    one = torch.ones((), dtype=denominator_N.dtype, device=denominator_N.device)
    zero = torch.zeros((), dtype=numerator_N.dtype, device=numerator_N.device)
    ratio_N = numerator_N / torch.where(excluded_N, one, denominator_N)
    return torch.where(excluded_N, zero, ratio_N), excluded_N
