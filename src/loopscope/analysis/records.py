"""Results of queries as plain Python and NumPy."""

import itertools
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


def list_groups(
    rows: pa.Table, names: Sequence[str], column: str
) -> Iterator[tuple[tuple[Any, ...], slice, npt.NDArray[np.int64]]]:
    """Rows that follow each other with equal values of `names`, n at a time.

    Args:
        rows: in the order of `names`.
        names: the columns that hold a group together.
        column: of lists that are equally long, E, within a group.

    Yields:
        The values of `names`; where the rows are; their lists as [n, E].
    """
    lengths = pc.list_value_length(rows[column]).to_numpy()
    flat, ends = pc.list_flatten(rows[column]).to_numpy(), np.r_[0, np.cumsum(lengths, dtype=np.int64)]
    end = 0
    for key, group in itertools.groupby(zip(*(rows[name].to_pylist() for name in names), strict=True)):
        begin, end = end, end + sum(1 for _ in group)
        yield key, slice(begin, end), flat[ends[begin] : ends[end]].reshape(end - begin, -1)
