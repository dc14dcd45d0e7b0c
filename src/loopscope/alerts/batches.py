"""A table's live rows as batches of whole steps, in the order of their steps, of those that speak for the run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from loopscope.catalog.row_batch import Ints, RowBatch
from loopscope.catalog.rows import SCOPE, speaking
from loopscope.catalog.rule_registry import RULE_COLUMNS
from loopscope.store import RunReader
from loopscope.store.parts.parquet import arrow_source, conform
from loopscope.store.read.files import SealedPart

_LISTS = {"expert_count": "dead_experts"}
"""Column of lists → the column that is above 0 where the list matters. Lists are most of a table's bytes: they are read
where they matter alone, and are null elsewhere."""


def batches(reader: RunReader, table: str) -> Iterator[RowBatch]:
    """What the rules read of a table; no step is in two batches. A file that cannot be read is left out."""
    held: pa.Table | None = None
    files = _in_order(reader, table)
    lowest = min((file.rank for file in files if file.rank is not None), default=None)
    for file in files:
        for rows in file.read():
            if held is not None:
                rows = pa.concat_tables([held, rows])
            if not rows.num_rows:
                continue
            # The last step's rows may go on in the next file.
            ends = pc.equal(rows["step"], pc.max(rows["step"]))
            held = rows.filter(ends)
            yield from _speaking(table, rows.filter(pc.invert(ends)), lowest)
    if held is not None:
        yield from _speaking(table, held, lowest)


def arrow_column(rows: pa.Table, name: str) -> Any:
    """A column as the rules read it.

    Numbers become float64, NaN where they are null; texts objects; lists are taken out one at a time.
    """
    column = rows[name].combine_chunks()
    if pa.types.is_list(column.type):
        return _Lists(column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy())
    if pa.types.is_string(column.type):
        texts = column.dictionary_encode()
        known = np.array([*texts.dictionary.to_pylist(), None], dtype=object)
        return known[texts.indices.fill_null(len(known) - 1).to_numpy()]
    if name == "step":
        return column.to_numpy()
    return column.cast(pa.float64()).fill_null(np.nan).to_numpy()


class _Lists:
    """A column of lists, of which few are looked at; a null is an empty list."""

    def __init__(self, values: NDArray[Any], bounds: Ints) -> None:
        self._values, self._bounds = values, bounds

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return _Lists(self._values, self._bounds[index])
        return self._values[self._bounds[index] : self._bounds[index + 1]].tolist()


def _speaking(table: str, rows: pa.Table, lowest: int | None) -> Iterator[RowBatch]:
    keep = speaking({name: arrow_column(rows, name) for name in SCOPE}, lowest)
    if not keep.all():
        rows = rows.filter(pa.array(keep))
    step = rows["step"].to_numpy()
    if (step[1:] < step[:-1]).any():
        rows = rows.take(pa.array(np.argsort(step, kind="stable")))
    if rows.num_rows:
        yield RowBatch(table, partial(arrow_column, rows))


@dataclass(frozen=True, slots=True)
class _File:
    """A part, or a journal's rows."""

    order: tuple[int, int, int]
    """Where its attempt begins to be live, its first step, its number."""
    rank: int | None
    """The lowest rank of its rank-local rows."""
    read: Callable[[], Iterator[pa.Table]]


def _in_order(reader: RunReader, table: str) -> list[_File]:
    names = (*SCOPE, *RULE_COLUMNS[table])
    parts = reader.parts(table)
    first_writer: dict[int, tuple[int, str]] = {}
    for part in parts:
        name = (len(part.segment.writer), part.segment.writer)
        first_writer[part.segment.attempt] = min(first_writer.get(part.segment.attempt, name), name)
    found = []
    for part in parts:
        number = part.segment.attempt
        if (len(part.segment.writer), part.segment.writer) != first_writer[number]:
            continue  # the lowest rank writes first in the order of names; the others' rows would be left out anyway
        order = (reader.live[number].start, _smallest(part, "step") or 0, part.segment.seq)
        found.append(_File(order, _smallest(part, "rank"), _reads_part(reader, part, names)))
    for number, chunk in reader.journal_rows(table):
        if chunk.num_rows:
            order = (reader.live[number].start, pc.min(chunk["step"]).as_py(), 1 << 60)
            found.append(
                _File(order, pc.min(chunk["rank"]).as_py(), _reads_chunk(reader, chunk, number, names))
            )
    return sorted(found, key=lambda file: file.order)


def _smallest(part: SealedPart, name: str) -> int | None:
    """A column's smallest value, as the part's statistics say."""
    try:
        with pq.ParquetFile(arrow_source(part.path)) as file:
            position, groups = file.schema_arrow.names.index(name), range(file.num_row_groups)
            found = [file.metadata.row_group(group).column(position).statistics.min for group in groups]
            return min((int(value) for value in found if value is not None), default=None)
    except (OSError, ValueError, AttributeError, TypeError, IndexError, pa.ArrowException):
        return None


def _reads_part(
    reader: RunReader, part: SealedPart, names: tuple[str, ...]
) -> Callable[[], Iterator[pa.Table]]:
    fields = reader.schema(part.table).arrow

    def read() -> Iterator[pa.Table]:
        try:
            with pq.ParquetFile(arrow_source(part.path), page_checksum_verification=True) as file:
                there = set(file.schema_arrow.names)
                for group in range(file.num_row_groups):

                    def columns(wanted: list[str], group: int = group) -> pa.Table:
                        found = file.read_row_group(group, columns=[name for name in wanted if name in there])
                        return conform(found, pa.schema([fields.field(name) for name in wanted]))

                    yield reader.only_live(_with_lists(columns, names), part.segment.attempt)
        except (OSError, ValueError, pa.ArrowException):
            return

    return read


def _reads_chunk(
    reader: RunReader, chunk: pa.Table, attempt: int, names: tuple[str, ...]
) -> Callable[[], Iterator[pa.Table]]:
    return lambda: iter((reader.only_live(_with_lists(chunk.select, names), attempt),))


def _with_lists(columns: Callable[[list[str]], pa.Table], names: tuple[str, ...]) -> pa.Table:
    """Columns by name; of the lists those that matter."""
    rows = columns([name for name in names if name not in _LISTS])
    for name in _LISTS.keys() & set(names):
        above = pc.greater(rows[_LISTS[name]], 0).fill_null(False).combine_chunks()
        index = pc.if_else(above, pa.array(np.arange(rows.num_rows)), None)
        if above.true_count:
            taken = columns([name])[name].combine_chunks().take(index)
        else:
            taken = pa.nulls(rows.num_rows, pa.list_(pa.int64()))
        rows = rows.append_column(name, taken)
    return rows
