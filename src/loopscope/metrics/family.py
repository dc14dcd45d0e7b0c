"""A family of metrics that share partial sums: tensors → slots on the device, slots → columns on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, TypeVar

from torch import Tensor

from loopscope.catalog.column import Column
from loopscope.catalog.registry import TABLES
from loopscope.metrics.null import Found
from loopscope.metrics.partials import Partials

Context = TypeVar("Context")

FoundColumns = Mapping[str, Found]
"""Column name → what a family found, V rows of one layout."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A named piece of a partial vector."""

    name: str
    """Unique within the layout."""
    size: Literal["1", "E", "bins"] = "1"
    """One number, one per expert, or one per histogram bin."""


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
    partial: Callable[[Context], Mapping[str, Tensor]] | None = None
    """Slot name → tensor of the slot's size; None where the family only reads others' slots."""
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
