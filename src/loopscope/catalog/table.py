"""What a table is: its columns under a version, and the gauges that sum a step of it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from loopscope.catalog.column import Column, Place
from loopscope.catalog.gauge import Gauge
from loopscope.errors import SchemaError


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table's columns at its newest version. A version adds columns and never changes one."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    """Columns that name a row within one attempt; null counts as a value (`rank` of global rows)."""
    version: int = 1
    oldest: int = 1
    """The oldest version whose files are read; files of an older one are refused by name."""
    progress: bool = True
    """True where a row shows that training went on; health rows alone do not."""
    gauges: tuple[Gauge, ...] = ()
    """The numbers that stand for a step of this table."""
    shown_rows: tuple[tuple[str, str], ...] = ()
    """(column, value): the rows whose columns people see unasked; empty: every row."""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise SchemaError(f"table {self.name!r} names a column twice: {sorted(names)}")
        if missing := set(self.primary_key) - set(names):
            raise SchemaError(f"table {self.name!r} has key columns that do not exist: {sorted(missing)}")
        if late := [column.name for column in self.columns if not 1 <= column.since <= self.version]:
            raise SchemaError(
                f"table {self.name!r} is at version {self.version}, but columns {late} come later"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def by_name(self) -> Mapping[str, Column]:
        """Column name → column."""
        return {column.name: column for column in self.columns}

    @cached_property
    def metrics(self) -> Mapping[str, Column]:
        """Column name → column, of the measured values alone."""
        return {column.name: column for column in self.columns if column.is_metric}

    def shown(self, place: Place) -> tuple[Column, ...]:
        """The columns that people see there, in order."""
        return tuple(column for column in self.columns if place in column.shown)

    def describe(self) -> dict[str, Any]:
        """The schema as plain data, for `schemas/<table>.v<N>.json`."""
        return {
            "table": self.name,
            "version": self.version,
            "doc": self.doc,
            "primary_key": list(self.primary_key),
            "columns": [
                {
                    "name": c.name,
                    "type": c.type,
                    "nullable": not c.required,
                    "since": c.since,
                    "doc": c.formula,
                }
                for c in self.columns
            ],
        }
