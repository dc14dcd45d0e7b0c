"""Results of queries as plain Python and NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from loopscope.analysis.run import Run


def records(run: Run, query: str, parameters: Sequence[Any] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a query as dicts, some thousand at a time."""
    relation = run.sql(query, parameters)
    # The name changed in DuckDB 1.4; the older one is deprecated there.
    name = "to_arrow_reader" if hasattr(relation, "to_arrow_reader") else "fetch_record_batch"
    for batch in getattr(relation, name)(8192):
        yield from batch.to_pylist()


def value(run: Run, query: str) -> Any:
    """The first column of the first row of a query; None without a row."""
    rows = run.sql(query).fetchall()
    return rows[0][0] if rows else None


def list_values(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All values of a list column, and where each row's list begins and the last one ends."""
    lengths = pc.list_value_length(column).to_numpy()
    return pc.list_flatten(column).to_numpy(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
