"""Arrow tables as pandas frames, without a digit lost."""

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any, Literal, get_args

import pyarrow as pa

from loopscope.errors import ConfigError

DtypeBackend = Literal["numpy_nullable", "pyarrow"]


def to_pandas(
    rows: pa.Table, dtype_backend: DtypeBackend | None = None, *, whole: Collection[str] = ()
) -> Any:
    """A frame whose dtypes depend on the columns alone, never on whether one of these rows has a null.

    Args:
        rows: the rows.
        dtype_backend: "numpy_nullable" for pandas' own nullable types, "pyarrow" for Arrow's. None: NumPy's, save for
            integers and truth values, which NumPy has no null for: they would become floats, exact up to 2^53 only,
            and objects. They are pandas' nullable types (``Int64``, ``boolean``).
        whole: with None, columns of integers that are never null and stay NumPy's.

    Raises:
        ConfigError: another `dtype_backend`.
    """
    if dtype_backend not in (None, *get_args(DtypeBackend)):
        raise ConfigError(
            f"dtype_backend is {dtype_backend!r}, expected None, {' or '.join(map(repr, get_args(DtypeBackend)))}"
        )
    pd = import_module("pandas")
    if dtype_backend == "pyarrow":
        return rows.to_pandas(types_mapper=pd.ArrowDtype)
    exact = {pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
    if dtype_backend == "numpy_nullable":
        exact |= {
            pa.float32(): pd.Float32Dtype(),
            pa.float64(): pd.Float64Dtype(),
            pa.string(): pd.StringDtype(),
        }
        whole = ()
    mapper: Callable[[pa.DataType], Any] = exact.get
    frame = rows.to_pandas(types_mapper=mapper)
    plain = {
        name: rows.schema.field(name).type.to_pandas_dtype() for name in whole if name in rows.column_names
    }
    return frame.astype({name: kind for name, kind in plain.items() if not rows[name].null_count})
