"""What a section hands to the page: a chart, its data and everything that must be said about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Cell = float | int | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartData:
    """Rows by column, as the page holds them: a third of the bytes of a list of objects."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> ChartData:
        """From dicts that share their keys; floats keep five significant digits."""
        listed = list(rows)
        columns = tuple(listed[0]) if listed else ()
        return ChartData(columns=columns, rows=[[short(row[name]) for name in columns] for row in listed])

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"columns": list(self.columns), "rows": self.rows}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One picture with its words."""

    id: str
    """Identifier within the run's part of the page; findings link to it."""
    title: str
    text: str
    """What the picture shows and how to read it; one or two sentences."""
    spec: Mapping[str, Any]
    """Vega-Lite, without data."""
    data: ChartData
    metrics: tuple[tuple[str, str], ...]
    """(table, column) of what is drawn; their definitions are printed under it."""
    scope: str
    """Which rows it is made of: global, or one rank's."""
    notes: tuple[str, ...] = ()
    """How it was thinned, and what is missing and why."""
    wide: bool = False
    """True where it takes the page's whole width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Charts and words under one heading."""

    id: str
    nav: str
    """Short title for the page's navigation."""
    title: str
    charts: Sequence[Chart] = ()
    text: str = ""
    """An introduction; or why there is nothing to see."""
    tables: Sequence[Table] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A small table of text."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]] = ()
    note: str = ""
    folded: bool = False
    """True where most people need not see it."""


def short(value: Any) -> Cell:
    """A cell of five significant digits; None for what is not finite, which no chart could place."""
    if isinstance(value, Decimal):  # DuckDB's sum of integers
        value = float(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        rounded = float(f"{value:.5g}")
        # An integer beyond five digits is a count, a step or a number of tokens: nothing is rounded off it.
        if value.is_integer() and abs(value) < 1e15:
            return int(value)
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value  # type: ignore[no-any-return]
