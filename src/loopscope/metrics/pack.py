"""Partial vectors: how families' slots are packed into them, and how they merge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from loopscope.metrics.family import EMPTY, POISON, Family
from loopscope.metrics.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Partial vectors of one visit or pair, own storage, no graph.

    Over microbatches, and later ranks, `sums` merge by addition and `maxima` by maximum, entry by entry. Both
    are finite: `POISON` stands for a value that was not, `EMPTY` for the maximum over nothing.
    """

    sums: Float[Tensor, " n_sum"]
    maxima: Float[Tensor, " n_max"]

    @staticmethod
    def nothing(layout: Layout, device: torch.device) -> Reduced:
        """Of a batch without a token: adds nothing to whatever it is merged with."""
        return Reduced(
            torch.zeros(layout.n_sum, dtype=torch.float64, device=device),
            torch.full((layout.n_max,), EMPTY, dtype=torch.float64, device=device),
        )

    def merged(self, other: Reduced) -> Reduced:
        """Both together; the layouts must be the same."""
        return Reduced(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))


def pack(families: Iterable[Family[Any]], context: object, layout: Layout) -> Reduced:
    """Run the families on a context and put their slots where the layout says. No sync."""
    parts: dict[str, Tensor] = {}
    for family in families:
        if family.partial is not None:
            parts.update(family.partial(context))
    sums = torch.cat([parts[name].double().reshape(-1) for name in layout.sum_slices])
    poison = torch.full((), POISON, dtype=torch.float64, device=sums.device)
    sums = torch.where(sums.isfinite(), sums, poison)
    if not layout.max_slices:
        return Reduced(sums, sums.new_zeros(0))
    maxima = torch.cat([parts[name].double().reshape(-1) for name in layout.max_slices])
    return Reduced(sums, torch.where(maxima.isfinite(), maxima, poison))
