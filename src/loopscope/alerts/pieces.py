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
from loopscope.store.files import Part
from loopscope.store.reader import conform

SCOPE = ("step", "aggregation_scope", "rank")
"""Columns that say whose a row is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a table, and how to get more columns of them."""

    rows: pa.Table
    """The columns that were asked for."""
    fetch: Callable[[str], pa.ChunkedArray]
    """Another column of the same rows."""


def pieces(reader: RunReader, table: str, columns: Sequence[str]) -> Iterator[Piece]:
    """Live rows in the order of their steps; no step is in two pieces. Rows of rank 0 or of all ranks together alone.

    A file that cannot be read is left out, as everywhere.

    Args:
        reader: the run; its `live` says which rows are live.
        table: the table.
        columns: wanted ones, `SCOPE` among them.
    """
    held: Piece | None = None
    for load in _in_order(reader, table):
        for piece in load(columns):
            rows = piece.rows
            if held is not None and rows.num_rows:
                rows, piece = _joined(held, piece)
                held = None
            if not rows.num_rows:
                continue
            last = pc.max(rows["step"])
            ends = pc.equal(rows["step"], last)
            # The last step's rows may go on in the next file.
            held = _where(piece, ends)
            yield from _spoken(_where(piece, pc.invert(ends)))
    if held is not None:
        yield from _spoken(held)


def _spoken(piece: Piece) -> Iterator[Piece]:
    """Global rows at steps that have any, else those of rank 0."""
    rows = piece.rows
    if not rows.num_rows:
        return
    is_global = pc.equal(rows["aggregation_scope"], "global").fill_null(False)
    own = pc.or_(is_global, pc.equal(rows["rank"], 0).fill_null(True))
    keep = _flags(own)
    together = _flags(is_global)
    if together.any() and not together.all():
        step = np.asarray(rows["step"].combine_chunks())
        keep &= together | ~np.isin(step, step[together])
    if keep.all():
        yield piece
    elif keep.any():
        yield _where(piece, pa.array(keep))


_Load = Callable[[Sequence[str]], Iterator[Piece]]


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


def _first_step(part: Part) -> int:
    try:
        with pq.ParquetFile(part.path) as file:
            position = file.schema_arrow.names.index("step")
            statistics = file.metadata.row_group(0).column(position).statistics
            return int(statistics.min)
    except (OSError, ValueError, AttributeError, TypeError, IndexError, pa.ArrowException):
        return 0


def _of_part(reader: RunReader, part: Part) -> _Load:
    fields = reader.schema(part.table).arrow

    def read(group: int, wanted: pa.Schema) -> pa.Table:
        # Opened anew each time: a piece may be asked for more when the next file is open already.
        with pq.ParquetFile(part.path, page_checksum_verification=True) as file:
            there = set(file.schema_arrow.names)
            return conform(
                file.read_row_group(group, columns=[n for n in wanted.names if n in there]), wanted
            )

    def piece(group: int, target: pa.Schema) -> Piece:
        rows = read(group, target)
        live = _live(reader, rows, part.segment.attempt)

        def fetch(name: str) -> pa.ChunkedArray:
            return read(group, pa.schema([fields.field(name)]))[name].filter(live)

        return Piece(rows.filter(live), fetch)

    def load(columns: Sequence[str]) -> Iterator[Piece]:
        target = pa.schema([fields.field(name) for name in columns])
        try:
            for group in range(pq.read_metadata(part.path).num_row_groups):
                yield piece(group, target)
        except (OSError, ValueError, pa.ArrowException):
            return

    return load


def _of_chunk(reader: RunReader, chunk: pa.Table, attempt: int) -> _Load:
    def load(columns: Sequence[str]) -> Iterator[Piece]:
        live = reader.only_live(chunk, attempt)
        yield Piece(live.select(list(columns)), lambda name: live[name])

    return load


def _live(reader: RunReader, rows: pa.Table, attempt: int) -> pa.Array:
    live = reader.live[attempt]
    keep = pc.greater_equal(rows["step"], live.start)
    return keep if live.end is None else pc.and_(keep, pc.less(rows["step"], live.end))


def _where(piece: Piece, keep: pa.Array) -> Piece:
    return Piece(piece.rows.filter(keep), lambda name: piece.fetch(name).filter(keep))


def _joined(earlier: Piece, later: Piece) -> tuple[pa.Table, Piece]:
    rows = pa.concat_tables([earlier.rows, later.rows])

    def fetch(name: str) -> pa.ChunkedArray:
        both = [earlier.fetch(name), later.fetch(name)]
        return pa.chunked_array([chunk for column in both for chunk in column.chunks], type=both[0].type)

    return rows, Piece(rows, fetch)


def _flags(column: pa.ChunkedArray) -> Flags:
    return np.asarray(column.combine_chunks().to_numpy(zero_copy_only=False), dtype=np.bool_)
