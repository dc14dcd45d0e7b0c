"""A table of the catalogue as storage needs it: an Arrow schema, and a struct that checks a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa

from loopscope.catalog.table import Column, TableSpec
from loopscope.errors import SchemaError
from loopscope.store.types import TYPES

__all__ = ["Column", "TableSchema"]

_OWNER = ("run_id", "attempt")


@dataclass(frozen=True, kw_only=True)
class TableSchema(TableSpec):
    """A table's columns under a version, with what storage derives from them."""

    @classmethod
    def of(cls, spec: TableSpec) -> TableSchema:
        """The table that the catalogue declares."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec)})

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
        found: list[Any] = []
        for column in self.columns:
            kind = TYPES[column.type].python
            needed = column.required and column.name not in _OWNER
            found.append((column.name, kind) if needed else (column.name, kind | None, None))
        return msgspec.defstruct(
            f"{self.name.title()}Row", found, kw_only=True, forbid_unknown_fields=True, gc=False
        )

    @cached_property
    def orders(self) -> Mapping[int, tuple[str, ...]]:
        """Number of columns → their names in order, for every version that is read: each adds columns to the last."""
        versions = range(self.oldest, self.version + 1)
        return {len(names): names for v in versions if (names := self.at(v).names)}

    def at(self, version: int) -> TableSchema:
        """The schema as it was at an earlier version that is still read."""
        if not self.oldest <= version <= self.version:
            raise SchemaError(
                f"table {self.name!r} has versions {self.oldest} to {self.version}, got {version}"
            )
        columns = tuple(c for c in self.columns if c.since <= version)
        return replace(self, columns=columns, version=version)
