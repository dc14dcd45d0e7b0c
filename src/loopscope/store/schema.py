"""What a table is: named, typed, documented columns under a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa

from loopscope.errors import SchemaError
from loopscope.store.types import TYPES

_OWNER = ("run_id", "attempt")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    type: str
    """A name in `loopscope.store.types.TYPES`."""
    doc: str
    required: bool = False
    """True where a row without it says nothing; every other column may be null."""
    since: int = 1
    """The schema version that added it."""

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise SchemaError(f"column {self.name!r} has type {self.type!r}, expected one of {sorted(TYPES)}")


@dataclass(frozen=True)
class TableSchema:
    """A table's columns at its newest version. Columns are added in a new version, never changed."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]
    """Columns that name a row within one attempt; null counts as a value (`rank` of global rows)."""
    version: int = 1
    progress: bool = True
    """True where a row shows that training went on; health rows alone do not."""

    def __post_init__(self) -> None:
        names = [c.name for c in self.columns]
        if len(set(names)) != len(names):
            raise SchemaError(f"table {self.name!r} names a column twice: {sorted(names)}")
        if missing := set(self.primary_key) - set(names):
            raise SchemaError(f"table {self.name!r} has key columns that do not exist: {sorted(missing)}")
        if late := [c.name for c in self.columns if not 1 <= c.since <= self.version]:
            raise SchemaError(
                f"table {self.name!r} is at version {self.version}, but columns {late} come later"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(c.name for c in self.columns)

    @cached_property
    def name_set(self) -> frozenset[str]:
        """Column names."""
        return frozenset(self.names)

    @cached_property
    def arrow(self) -> pa.Schema:
        """The Arrow schema, all nullable: files of several versions then concatenate in every engine."""
        return pa.schema([(c.name, TYPES[c.type].arrow) for c in self.columns])

    @cached_property
    def row_type(self) -> type[msgspec.Struct]:
        """A struct that a row is converted to: unknown columns, wrong types, NaN and ±inf are refused."""
        # In the columns' order, which rows in journals are written in. The journal's header says whose the rows are.
        fields: list[Any] = []
        for column in self.columns:
            kind = TYPES[column.type].python
            needed = column.required and column.name not in _OWNER
            fields.append((column.name, kind) if needed else (column.name, kind | None, None))
        return msgspec.defstruct(
            f"{self.name.title()}Row", fields, kw_only=True, forbid_unknown_fields=True, gc=False
        )

    @cached_property
    def orders(self) -> Mapping[int, tuple[str, ...]]:
        """Number of columns → their names in order, for every version: a version adds columns, so none has as many."""
        return {len(names): names for v in range(1, self.version + 1) if (names := self.at(v).names)}

    def at(self, version: int) -> TableSchema:
        """The schema as it was at an earlier version."""
        if not 1 <= version <= self.version:
            raise SchemaError(f"table {self.name!r} has versions 1 to {self.version}, got {version}")
        columns = tuple(c for c in self.columns if c.since <= version)
        return TableSchema(self.name, self.doc, columns, self.primary_key, version, self.progress)

    def describe(self) -> dict[str, Any]:
        """The schema as plain data, for `schemas/<table>.v<N>.json`."""
        return {
            "table": self.name,
            "version": self.version,
            "doc": self.doc,
            "primary_key": list(self.primary_key),
            "columns": [
                {"name": c.name, "type": c.type, "nullable": not c.required, "since": c.since, "doc": c.doc}
                for c in self.columns
            ],
        }


def registry(schemas: Iterable[TableSchema]) -> Mapping[str, TableSchema]:
    """Name → schema; a name used twice is an error."""
    tables: dict[str, TableSchema] = {}
    for schema in schemas:
        if schema.name in tables:
            raise SchemaError(f"table {schema.name!r} is registered twice")
        tables[schema.name] = schema
    return tables
