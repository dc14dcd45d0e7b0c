"""The column types a table may have: the few that DuckDB, Polars, Daft and Spark read alike."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import pyarrow as pa
from msgspec import Meta

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
