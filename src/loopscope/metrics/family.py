"""What a metric's file works with: slots on the device, merged partial vectors on the host, columns and their nulls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loopscope.catalog.registry import TABLES
from loopscope.catalog.table import Column
from loopscope.catalog.traits import NAMES
from loopscope.metrics.layout import Layout

Context = TypeVar("Context")
Floats = NDArray[np.float64]

POISON = 1e300
"""Stands for "not finite" in a partial vector. It survives addition and maximum, and, unlike NaN, every
all-reduce handles it alike. Host code reads it back as NaN."""

EMPTY = -POISON
"""The identity of a maximum: no token was seen. Host code reads it back as NaN."""

_LIMIT = POISON / 10


@dataclass(frozen=True, slots=True)
class Null:
    """A value that does not exist, with the reason that goes into `null_reasons`."""

    reason: str
    """`not_applicable`, `absent:<why>`, `failed` or `nonfinite`."""


NOT_APPLICABLE = Null("not_applicable")
"""The metric does not exist for this shape or kind of row."""


def absent(why: str) -> Null:
    """The metric exists for this shape, but what it needs was not there."""
    return Null(f"absent:{why}")


class Masked:
    """A column some of whose rows do not exist.

    Args:
        values: [V] or [V, n]; what stands in rows that do not exist does not matter.
        nulls: (rows [V], why); the first that holds for a row counts.
    """

    __slots__ = ("nulls", "values")

    def __init__(self, values: NDArray[np.float64], *nulls: tuple[NDArray[np.bool_], Null]) -> None:
        self.values = values
        self.nulls = nulls


Found = NDArray[Any] | float | Null | Masked
"""A column as a metric gives it: an array [V] or [V, n], one number for all rows, a reason for all, or a mixture. What
is not finite becomes null."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Named access to the merged sums and maxima of V visits (or pairs) of one layout, in NumPy float64.

    `p["z"]` is an array [V, size of the slot], `p.number("z")` an array [V]. Poisoned and empty entries read as NaN.
    """

    layout: Layout
    sums: Floats
    maxima: Floats
    is_softmax: NDArray[np.bool_]
    """[V]; False for a sigmoid router."""
    sequence_sharded: bool = False
    counts: tuple[Floats, Floats] = (np.zeros((0, 0)), np.zeros((0, 0)))
    """Expert counts [V, E] of both visits of each pair of one layer, NaN where they are not known."""

    @staticmethod
    def of(
        layout: Layout,
        sums: Floats,
        maxima: Floats,
        *,
        is_softmax: NDArray[np.bool_] | None = None,
        sequence_sharded: bool = False,
        counts: tuple[Floats | None, Floats | None] = (None, None),
    ) -> Partials:
        """Decode the sentinels of merged vectors (float64 [V, n_sum] and [V, n_max])."""
        unknown = np.full((len(sums), layout.num_experts), np.nan)
        first, second = (unknown if count is None else count for count in counts)
        return Partials(
            layout,
            np.where(np.abs(sums) >= _LIMIT, np.nan, sums),
            np.where(np.abs(maxima) >= _LIMIT, np.nan, maxima),
            np.ones(len(sums), dtype=np.bool_) if is_softmax is None else is_softmax,
            sequence_sharded,
            (first, second),
        )

    def __len__(self) -> int:
        return len(self.sums)

    def __getitem__(self, slot: str) -> Floats:
        """[V, size]: the slot's entries, from the sums or the maxima, whichever holds it."""
        if slot in self.layout.sum_slices:
            return self.sums[:, self.layout.sum_slices[slot]]
        return self.maxima[:, self.layout.max_slices[slot]]

    def row(self, index: int) -> Partials:
        """One visit or pair alone, V = 1."""
        at = slice(index, index + 1)
        return Partials(
            self.layout,
            self.sums[at],
            self.maxima[at],
            self.is_softmax[at],
            self.sequence_sharded,
            (self.counts[0][at], self.counts[1][at]),
        )

    def number(self, slot: str) -> Floats:
        """[V]: the values of a slot of size one."""
        return self[slot][:, 0]

    def mean(self, slot: str, count: str = "tokens") -> Floats:
        """[V]: sum divided by count; NaN where nothing was counted."""
        n = self.number(count)
        return np.where(n > 0, self.number(slot) / n, np.nan)

    def mean_without(self, slot: str, excluded: str, count: str = "tokens") -> Masked:
        """Sum divided by the count of what is not excluded; `not_applicable` where everything is excluded."""
        n = self.number(count)
        left = n - self.number(excluded)
        value = np.where(left > 0, self.number(slot) / left, np.nan)
        return Masked(value, ((n > 0) & (left == 0), NOT_APPLICABLE))

    def nonfinite(self, name: str) -> NDArray[np.int64]:
        """[V]: non-finite entries of an input among the valid tokens; 0 for an input that has no counter."""
        slot = f"nonfinite_{name}"
        if slot not in self.layout.sum_slices:
            return np.zeros(len(self), dtype=np.int64)
        return self.number(slot).astype(np.int64)

    def has(self, trait: str) -> NDArray[np.bool_]:
        """[V]: rows of which some microbatch had this trait."""
        found: NDArray[np.bool_] = self["traits"][:, NAMES.index(trait)] > 0
        return found

    @property
    def tokens(self) -> Floats:
        """[V]: valid tokens T."""
        return self.number("tokens")

    @property
    def num_experts(self) -> int:
        """E of the visits (of pairs: of the visits they lead to)."""
        return self.layout.num_experts

    @property
    def top_k(self) -> int:
        """k of the visits (of pairs: of the visits they lead to)."""
        return self.layout.top_k


FoundColumns = Mapping[str, Found]
"""Column name → what a family found, V rows of one layout."""

SlotTensors = Mapping[str, Tensor]
"""Slot name → tensor of the slot's size, on the device."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A named piece of a partial vector."""

    name: str
    """Unique within the layout."""
    size: Literal["1", "E", "bins", "traits"] = "1"
    """One number, one per expert, one per histogram bin, or one per trait of a visit."""


@dataclass(frozen=True, kw_only=True)
class Family(Generic[Context]):
    """The computation of the columns that the catalogue declares with `computed` set to this file's name.

    `partial` must not read a value back from the device. `finish` works on arrays in NumPy float64, all visits of one
    layout at once, and may divide by zero or meet NaN: a value that is not finite becomes null.
    """

    module: str
    """`__name__` of its file: `loopscope.metrics.<table>.<name>`."""
    sums: tuple[Slot, ...] = ()
    """Slots that merge by addition."""
    maxima: tuple[Slot, ...] = ()
    """Slots that merge by maximum (minima are stored negated)."""
    partial: Callable[[Context], SlotTensors] | None = None
    """None where the family only reads others' slots."""
    finish: Callable[[Partials], FoundColumns] | None = None
    """The columns; None where the slots are read by others alone."""

    @cached_property
    def table(self) -> str:
        """The table of its columns."""
        return self.module.split(".")[-2]

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns that `finish` gives, as the catalogue declares them."""
        name = self.module.rpartition(".")[2]
        table = TABLES.get(self.table)
        return () if table is None else tuple(c for c in table.columns if c.computed == name)
