"""Merged partial vectors as the host sees them, and the two sentinels that keep them finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopscope.metrics.null import NOT_APPLICABLE, Null

if TYPE_CHECKING:
    from loopscope.metrics.layout import Layout

POISON = 1e300
"""Stands for "not finite" in a partial vector. It survives addition and maximum, and, unlike NaN, every
all-reduce handles it alike. Host code reads it back as NaN."""

EMPTY = -POISON
"""The identity of a maximum: no token was seen. Host code reads it back as NaN."""

_LIMIT = POISON / 10


@dataclass(frozen=True, slots=True)
class Partials:
    """Named access to one visit's (or pair's) merged sums and maxima, in NumPy float64.

    `p["z"]` is an array of the slot's size, `p.number("z")` a float. Poisoned and empty entries read as NaN.
    """

    layout: Layout
    sums: NDArray[np.float64]
    maxima: NDArray[np.float64]
    score_func: str = "softmax"
    sequence_sharded: bool = False
    counts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Expert counts of both visits of a pair, where both have a router."""

    @staticmethod
    def of(
        layout: Layout,
        sums: NDArray[np.float64],
        maxima: NDArray[np.float64],
        *,
        score_func: str = "softmax",
        sequence_sharded: bool = False,
        counts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> Partials:
        """Decode the sentinels of two merged vectors (float64 [n_sum] and [n_max])."""
        return Partials(
            layout,
            np.where(np.abs(sums) >= _LIMIT, np.nan, sums),
            np.where(np.abs(maxima) >= _LIMIT, np.nan, maxima),
            score_func,
            sequence_sharded,
            counts,
        )

    def __getitem__(self, slot: str) -> NDArray[np.float64]:
        """The slot's entries, from the sums or the maxima, whichever holds it."""
        if slot in self.layout.sum_slices:
            return self.sums[self.layout.sum_slices[slot]]
        return self.maxima[self.layout.max_slices[slot]]

    def number(self, slot: str) -> float:
        """The value of a slot of size one."""
        return float(self[slot][0])

    def mean(self, slot: str, count: str = "tokens") -> float:
        """Sum divided by count; NaN where nothing was counted."""
        n = self.number(count)
        return self.number(slot) / n if n > 0 else float("nan")

    def mean_without(self, slot: str, excluded: str, count: str = "tokens") -> float | Null:
        """Sum divided by the count of what is not excluded; `not_applicable` where everything is excluded."""
        n = self.number(count)
        left = n - self.number(excluded)
        if n > 0 and left == 0:
            return NOT_APPLICABLE
        return self.number(slot) / left if left > 0 else float("nan")

    def nonfinite(self, name: str) -> int:
        """Non-finite entries of an input among the valid tokens; 0 for an input that has no counter."""
        slot = f"nonfinite_{name}"
        return int(self.number(slot)) if slot in self.layout.sum_slices else 0

    @property
    def tokens(self) -> float:
        """Valid tokens T."""
        return self.number("tokens")

    @property
    def num_experts(self) -> int:
        """E of the visit (of a pair: of the visit it leads to)."""
        return self.layout.num_experts

    @property
    def top_k(self) -> int:
        """k of the visit (of a pair: of the visit it leads to)."""
        return self.layout.top_k
