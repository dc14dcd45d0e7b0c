"""A table of the catalogue as storage needs it: an Arrow schema, and a struct that checks a row."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from msgspec import Meta

from loopscope.catalog.table import Column, TableSpec
from loopscope.errors import SchemaError

_F64 = sys.float_info.max
_F32 = 3.4028234663852886e38

# NaN and ±inf fail the bounds: a float column holds finite numbers or null.
_Float64 = Annotated[float, Meta(ge=-_F64, le=_F64)]
_Float32 = Annotated[float, Meta(ge=-_F32, le=_F32)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Time = Annotated[datetime, Meta(tz=True)]


@dataclass(frozen=True, slots=True)
class ColumnType:
    """One type: its name in schemas, its Arrow form, and what a row may hold for it."""

    name: str
    arrow: pa.DataType
    python: Any
    """A msgspec annotation; a value that does not satisfy it is refused."""


def _list(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item))


TYPES: dict[str, ColumnType] = {
    t.name: t
    for t in (
        ColumnType("bool", pa.bool_(), bool),
        ColumnType("int32", pa.int32(), _Int32),
        ColumnType("int64", pa.int64(), _Int64),
        ColumnType("float32", pa.float32(), _Float32),
        ColumnType("float64", pa.float64(), _Float64),
        ColumnType("string", pa.string(), str),
        ColumnType("timestamp[us, UTC]", pa.timestamp("us", tz="UTC"), _Time),
        ColumnType("list<int64>", _list(pa.int64()), list[_Int64]),
        ColumnType("list<float32>", _list(pa.float32()), list[_Float32]),
        ColumnType("list<float64>", _list(pa.float64()), list[_Float64]),
    )
}
"""No float16, no unsigned, no nanoseconds, no string_view: an engine somewhere reads each of them wrongly."""


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
        kinds = [(c, TYPES[c.type].python) for c in self.columns]
        found: list[Any] = [
            (c.name, kind) if c.required and c.name not in _OWNER else (c.name, kind | None, None)
            for c, kind in kinds
        ]
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
