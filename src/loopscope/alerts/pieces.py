"""A table's live rows a piece at a time, in the order of their steps, of the one rank that speaks for the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loopscope.alerts.columns import Flags
from loopscope.store import RunReader
from loopscope.store.parts.parquet import conform
from loopscope.store.read.files import SealedPart

SCOPE = ("step", "aggregation_scope", "rank")
"""Columns that say whose a row is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """A column of lists that is read where it matters alone: it is most of a table's bytes."""

    column: str
    where: str
    """The column that is above 0 where the list matters; elsewhere the list is null."""


def pieces(
    reader: RunReader, table: str, columns: Sequence[str], *, lists: Lists | None = None
) -> Iterator[pa.Table]:
    """Live rows in the order of their steps; no step is in two pieces. Rows of rank 0 or of all ranks together alone.

    A file that cannot be read is left out, as everywhere.

    Args:
        reader: the run; its `live` says which rows are live.
        table: the table.
        columns: wanted ones, `SCOPE` among them.
        lists: one more column.
    """
    held: pa.Table | None = None
    for load in _in_order(reader, table):
        for rows in load(columns, lists):
            if held is not None:
                rows = pa.concat_tables([held, rows])
            if not rows.num_rows:
                continue
            # The last step's rows may go on in the next file.
            ends = pc.equal(rows["step"], pc.max(rows["step"]))
            held = rows.filter(ends)
            yield from _spoken(rows.filter(pc.invert(ends)))
    if held is not None:
        yield from _spoken(held)


def _spoken(rows: pa.Table) -> Iterator[pa.Table]:
    """Global rows at steps that have any, else those of rank 0."""
    if not rows.num_rows:
        return
    is_global = pc.equal(rows["aggregation_scope"], "global").fill_null(False)
    together = _flags(is_global)
    keep = _flags(pc.or_(is_global, pc.equal(rows["rank"], 0).fill_null(True)))
    if together.any() and not together.all():
        step = np.asarray(rows["step"].combine_chunks())
        keep &= together | ~np.isin(step, step[together])
    if keep.all():
        yield rows
    elif keep.any():
        yield rows.filter(pa.array(keep))


_Load = Callable[[Sequence[str], Lists | None], Iterator[pa.Table]]


def _in_order(reader: RunReader, table: str) -> list[_Load]:
    found: list[tuple[int, int, int, _Load]] = []
    first_writer: dict[int, tuple[int, str]] = {}
    parts = reader.parts(table)
    for part in parts:
        name = (len(part.segment.writer), part.segment.writer)
        first_writer[part.segment.attempt] = min(first_writer.get(part.segment.attempt, name), name)
    for part in parts:
        number = part.segment.attempt
        if (len(part.segment.writer), part.segment.writer) != first_writer[number]:
            continue  # rank 0 writes first in the order of names; the others' rows would be left out anyway
        start = reader.live[number].start
        found.append((start, _first_step(part), part.segment.seq, _of_part(reader, part)))
    for number, chunk in reader.journal_rows(table):
        if chunk.num_rows:
            first = pc.min(chunk["step"]).as_py()
            found.append((reader.live[number].start, first, 1 << 60, _of_chunk(reader, chunk, number)))
    found.sort(key=lambda entry: entry[:3])
    return [load for *_, load in found]


def _first_step(part: SealedPart) -> int:
    try:
        with pq.ParquetFile(part.path) as file:
            position = file.schema_arrow.names.index("step")
            statistics = file.metadata.row_group(0).column(position).statistics
            return int(statistics.min)
    except (OSError, ValueError, AttributeError, TypeError, IndexError, pa.ArrowException):
        return 0


def _of_part(reader: RunReader, part: SealedPart) -> _Load:
    fields = reader.schema(part.table).arrow

    def read(file: pq.ParquetFile, group: int, names: Sequence[str]) -> pa.Table:
        there = set(file.schema_arrow.names)
        found = file.read_row_group(group, columns=[name for name in names if name in there])
        return conform(found, pa.schema([fields.field(name) for name in names]))

    def load(columns: Sequence[str], lists: Lists | None) -> Iterator[pa.Table]:
        try:
            with pq.ParquetFile(part.path, page_checksum_verification=True) as file:
                for group in range(file.num_row_groups):
                    rows = read(file, group, columns)
                    if lists is not None:
                        index = _matters(rows, lists)
                        there = index.null_count < len(index)
                        column = read(file, group, [lists.column])[lists.column] if there else None
                        rows = rows.append_column(
                            lists.column, _taken(column, index, fields.field(lists.column))
                        )
                    yield reader.only_live(rows, part.segment.attempt)
        except (OSError, ValueError, pa.ArrowException):
            return

    return load


def _of_chunk(reader: RunReader, chunk: pa.Table, attempt: int) -> _Load:
    def load(columns: Sequence[str], lists: Lists | None) -> Iterator[pa.Table]:
        rows = chunk.select(list(columns))
        if lists is not None:
            taken = _taken(chunk[lists.column], _matters(chunk, lists), chunk.schema.field(lists.column))
            rows = rows.append_column(lists.column, taken)
        yield reader.only_live(rows, attempt)

    return load


def _matters(rows: pa.Table, lists: Lists) -> pa.Array:
    """The number of each row whose list matters, null for the others."""
    above = _flags(pc.greater(rows[lists.where], 0).fill_null(False))
    return pa.array(np.arange(rows.num_rows), mask=~above)


def _taken(column: pa.ChunkedArray | None, index: pa.Array, field: pa.Field) -> pa.Array:
    return pa.nulls(len(index), field.type) if column is None else column.combine_chunks().take(index)


def _flags(column: pa.ChunkedArray) -> Flags:
    return np.asarray(column.combine_chunks().to_numpy(zero_copy_only=False), dtype=np.bool_)
