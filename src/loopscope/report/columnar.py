"""Numbers of a query on their way to the page: five significant digits, as columns."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_POWERS = np.array([float(f"1e{n}") for n in range(23)])
"""The powers of ten that float64 holds exactly."""
_EXACT = 1e15
"""Whole numbers below it are exact, and printed as integers."""


def shorten(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Five significant digits, the very ones of ``f"{value:.5g}"``; whole numbers below 1e15 stay as they are.

    A whole number is a count, a step or a number of tokens: nothing is rounded off it.

    Args:
        values: [n]; NaN and infinities stay.
    """
    with np.errstate(all="ignore"):
        # Decimal places to keep; log10 may be off by one next to a power of ten, where it makes no difference.
        places = np.nan_to_num(4 - np.floor(np.log10(np.abs(values))), nan=0, posinf=0, neginf=0).astype(
            np.int64
        )
        power = _POWERS[np.minimum(np.abs(places), len(_POWERS) - 1)]
        scaled = np.where(places >= 0, values * power, values / power)
        digits = np.rint(scaled)
        found: NDArray[np.float64] = np.where(places >= 0, digits / power, digits * power)
        # Scaling is not exact: near a tie, and where the power is not, decimal arithmetic decides.
        unsure = (np.abs(np.abs(scaled - digits) - 0.5) < 1e-6) | (np.abs(places) >= len(_POWERS))
        found[unsure] = [float(f"{value:.5g}") for value in values[unsure].tolist()]
        keep = ((values == np.rint(values)) & (np.abs(values) < _EXACT)) | ~np.isfinite(values)
    return np.where(keep, values, found)


def shortened(table: pa.Table) -> pa.Table:
    """The table with floats shortened, and null where they are not finite; DuckDB's sums of integers as integers."""
    return pa.table([_shortened(column) for column in table.columns], names=table.column_names)


def _shortened(column: pa.ChunkedArray) -> Any:
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64() if column.type.scale else pa.int64())
    if not pa.types.is_floating(column.type):
        return column
    values = shorten(column.to_numpy())
    return pa.array(values, mask=~np.isfinite(values))


def columnar(table: pa.Table) -> dict[str, Any]:
    """`columns` and, for each, its `values`, ready for JSON: shortened, None for what no chart could place."""
    return {"columns": table.column_names, "values": [_cells(column) for column in table.columns]}


def _cells(column: pa.ChunkedArray) -> list[Any]:
    if not pa.types.is_floating(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    values = shorten(column.to_numpy())
    cells = values.astype(object)
    whole = (values == np.rint(values)) & (np.abs(values) < _EXACT)
    cells[whole] = values[whole].astype(np.int64)
    cells[~np.isfinite(values)] = None
    return cells.tolist()  # type: ignore[no-any-return]
