"""What a section hands to the page: a chart, its data and everything that must be said about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One picture with its words."""

    id: str
    """Identifier within the run's page; findings link to it."""
    title: str
    text: str
    """What the picture shows and how to read it; one or two sentences."""
    spec: Mapping[str, Any]
    """Vega-Lite, without data."""
    data: pa.Table
    """What it draws; a chart without a row has no picture."""
    metrics: tuple[tuple[str, str], ...]
    """(table, column) of what is drawn; their definitions are printed under it."""
    scope: str
    """Which rows it is made of: global, or one rank's."""
    notes: tuple[str, ...] = ()
    """How it was thinned, and what is missing and why."""


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
