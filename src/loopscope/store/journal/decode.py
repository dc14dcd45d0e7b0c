"""Decoding a journal: what is damaged or missing, and its rows as Arrow columns, a chunk at a time."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from loopscope.store.journal.frames import Frame, Gap, JournalHeader, journal_header, refusal, scan
from loopscope.store.schema import TableSchema

_SHOWN = 20
"""Faults of one file that are listed one by one."""

TakeRow = Callable[[str, tuple[str, ...], list[Any]], None]
"""Takes a table's name, the names of its columns, and one row's values in their order."""

_decode = msgspec.msgpack.Decoder(tuple[str, dict[str, Any] | list[Any]]).decode
_table_of = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode


@dataclass
class JournalContent:
    """What was found in a journal file."""

    header: JournalHeader | None = None
    num_rows: int = 0
    """Good rows of all tables."""
    lost: int = 0
    """Frames known to be missing or bad before the last good one."""
    faults: list[str] = field(default_factory=list)
    """What is wrong, for people; the last one may say how many more there are."""
    refused: str = ""
    """Why none of its rows was decoded, where this version does not read such a journal. Its rows are not lost."""
    torn: bool = False
    """True where the file ends inside a frame: at most one row, whose append had not returned."""


def decode_journal(
    name: str, data: bytes, tables: Mapping[str, TableSchema], take: TakeRow
) -> JournalContent:
    """Hand every good row to `take`; damage is named in `faults` and counted in `lost`.

    Args:
        name: of the file, for messages.
        data: its content.
        tables: the registry; it knows the columns of a table whose first row in the file is damaged.
        take: see `TakeRow`.
    """
    content = JournalContent(journal_header(data))
    if content.header is not None and (reason := refusal(content.header, tables)):
        content.refused = reason
        return content
    columns: dict[str, tuple[str, ...]] = {}
    faults, expected = content.faults, 0
    for piece in scan(data):
        if isinstance(piece, Gap):
            if piece.torn and piece.end == len(data):
                content.torn = True
                continue
            faults.append(f"{name}: bytes {piece.start} to {piece.end} are damaged")
            content.lost += piece.end == len(data)
            continue
        if (missing := piece.ordinal - expected) != 0:
            faults.append(f"{name}: {missing} record(s) missing before record {piece.ordinal}")
            content.lost += max(missing, 0)
        expected = piece.ordinal + 1
        try:
            if piece.ordinal == 0:
                if content.header is None:
                    raise ValueError("expected a header")
                continue
            table, row = _decode(piece.payload)
            if isinstance(row, dict):
                columns[table] = tuple(row)
                row = [*row.values()]
            if len(names := columns.get(table, ())) != len(row):
                names = _names_by_number(tables, table, len(row))
            take(table, names, row)
            content.num_rows += 1
        except (msgspec.DecodeError, ValueError) as error:
            faults.append(f"{name}: record {piece.ordinal} cannot be decoded ({error})")
            content.lost += 1
    if (more := len(faults) - _SHOWN) > 0:
        faults[_SHOWN:] = [f"{name}: {more} more"]
    return content


def _names_by_number(tables: Mapping[str, TableSchema], table: str, count: int) -> tuple[str, ...]:
    names = tables[table].orders.get(count) if table in tables else None
    if names is None:
        raise ValueError(f"a row of {table!r} has {count} values, and the row with their names is lost")
    return names


def holds_row_of(data: bytes, tables: Collection[str]) -> bool:
    """True where the journal holds a row of one of the tables; stops at the first."""
    for piece in scan(data):
        if isinstance(piece, Frame) and piece.ordinal > 0:
            with contextlib.suppress(msgspec.DecodeError):
                if _table_of(piece.payload)[0] in tables:
                    return True
    return False


CHUNK_ROWS = 2048
"""Rows that are Python objects at a time, per table."""
_MISFIT = (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError)


class JournalColumns:
    """Collects rows by table; made to be handed to `decode_journal`.

    Args:
        tables: the registry.
        keys: the columns that every row shares and that rows leave out.
    """

    def __init__(self, tables: Mapping[str, TableSchema], keys: Mapping[str, Any]) -> None:
        self._tables = tables
        self._keys = keys
        self._pending: dict[str, tuple[tuple[str, ...], list[Sequence[Any]]]] = {}
        self._chunks: dict[str, list[pa.Table]] = {}
        self.unknown_tables: dict[str, int] = {}
        """Table that the registry does not know → rows."""
        self.unknown_columns: dict[str, set[str]] = {}
        """Table → columns with values that the registry does not know; complete once `tables` was called."""
        self.misfits: dict[str, int] = {}
        """Table → rows whose values do not fit the registry's types; the same."""

    def __call__(self, table: str, names: tuple[str, ...], values: Sequence[Any]) -> None:
        """Take one row: the names of its columns, and its values in their order."""
        pending = self._pending.get(table)
        if pending is None or pending[0] != names:
            if table not in self._tables:
                self.unknown_tables[table] = self.unknown_tables.get(table, 0) + 1
                return
            self._convert(table)
            pending = self._pending[table] = names, []
        pending[1].append(values)
        if len(pending[1]) >= CHUNK_ROWS:
            self._convert(table)

    def tables(self) -> dict[str, list[pa.Table]]:
        """Table → Arrow chunks of everything taken so far, in the registry's columns."""
        for table in list(self._pending):
            self._convert(table)
        return self._chunks

    def _convert(self, table: str) -> None:
        names, rows = self._pending.pop(table, ((), []))
        chunks = self._chunks.setdefault(table, [])
        try:
            chunks += self._chunk(table, names, rows)
        except _MISFIT:
            # One bad row must not take its neighbours along.
            for row in rows:
                try:
                    chunks += self._chunk(table, names, [row])
                except _MISFIT:
                    self.misfits[table] = self.misfits.get(table, 0) + 1

    def _chunk(self, table: str, names: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> list[pa.Table]:
        if not rows:
            return []
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        schema, missing = self._tables[table], [None] * len(rows)
        arrays = [
            pa.repeat(pa.scalar(self._keys[of.name], of.type), len(rows))
            if of.name in self._keys
            else pa.array(columns.get(of.name, missing), type=of.type)
            for of in schema.arrow
        ]
        unknown = {name for name in columns.keys() - schema.name_set if columns[name] != (*missing,)}
        if unknown:
            self.unknown_columns.setdefault(table, set()).update(unknown)
        return [pa.Table.from_arrays(arrays, schema=schema.arrow)]
