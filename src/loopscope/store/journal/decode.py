"""The journal: an append-only file of frames that this process alone writes.

The first frame is the header. Every other one is a row: its table, and its values in the order of the table's columns.
The first row of each table holds the columns' names too, so that a reader of another version knows them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from loopscope.store.disk import Disk
from loopscope.store.journal.frames import Frame, Gap, encode_frame, encode_frames, scan
from loopscope.store.schema import TableSchema

FORMAT = 2
"""The newest format that this version reads, and the one that it writes."""

_SHOWN = 20
"""Faults of one file that are told one by one."""


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame: enough to read the rows when everything else is gone."""

    format: int = FORMAT
    """1: every row holds its columns' names, and leaves out those that are null. Still read."""
    run_id: str
    attempt: int
    parent_attempt: int | None
    first_step: int
    world_size: int
    writer: str
    seq: int
    schemas: dict[str, int]
    loopscope_version: str


TakeRow = Callable[[str, dict[str, Any]], None]
"""Takes a table's name and one row."""

_encode = msgspec.msgpack.Encoder().encode
_HEADER = msgspec.msgpack.Decoder(JournalHeader)
_ROW = msgspec.msgpack.Decoder(tuple[str, dict[str, Any] | list[Any]])
_TABLE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_values = msgspec.structs.astuple
_named = msgspec.structs.asdict


class Journal:
    """An open journal file. `append` either keeps the whole row or leaves the file as it was."""

    def __init__(self, disk: Disk, path: Path, header: JournalHeader) -> None:
        """Create the file; raises OSError, and leaves no file behind where it can help it."""
        self._disk = disk
        self.path = path
        self.fd = disk.create(path)
        self.size = 0
        self.rows = 0
        self.dirty = False
        self.named = False
        """True once the folder's entry for the file is on the disk too."""
        self._ordinal = 0
        self._torn = False
        self._known: set[str] = set()
        """Tables whose columns the file names already."""
        try:
            self._write(encode_frame(0, _encode(header)), 1)
        except OSError:
            with contextlib.suppress(OSError):
                disk.close(self.fd)
            with contextlib.suppress(OSError):
                disk.unlink(path)
            raise

    def append(self, table: str, rows: Sequence[msgspec.Struct]) -> None:
        """Write rows, all or none. OSError where they are not in the file."""
        count = len(rows)
        if table not in self._known:
            first = _encode((table, _named(rows[0])))
            rest = [_encode((table, _values(row))) for row in rows[1:]]
            self._write(encode_frames(self._ordinal, [first, *rest]), count)
            self._known.add(table)  # Only once it is in the file.
        elif count == 1:
            # Every step's loss row comes alone: making a list of one costs as much as its frame.
            self._write(encode_frame(self._ordinal, _encode((table, _values(rows[0])))), 1)
        else:
            self._write(encode_frames(self._ordinal, [_encode((table, _values(row))) for row in rows]), count)
        self.rows += count

    def _write(self, data: bytes, count: int) -> None:
        if self._torn:
            self._repair()
        try:
            taken = self._disk.write(self.fd, data)
            while taken < len(data):
                # A signal or an almost full disk: try the rest, which then fails with the reason.
                more = self._disk.write(self.fd, data[taken:])
                if more <= 0:
                    raise OSError(5, "the disk took nothing and gave no reason")
                taken += more
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                self._repair()
            raise
        self._ordinal += count
        self.size += len(data)
        self.dirty = True

    def _repair(self) -> None:
        """Cut a half-written frame off, so that the next one stands right behind the last good one."""
        self._disk.truncate(self.fd, self.size)
        self._torn = False

    def fsync(self, fd: int) -> None:
        """Put what was written on the disk, and the first time the file's name. Raises OSError.

        Args:
            fd: of the file; another one than its own where it may be closed meanwhile.
        """
        self._disk.fsync(fd)
        if not self.named:
            self._disk.fsync_dir(self.path.parent)
            self.named = True

    def close(self) -> None:
        """Close the file; what was written stays in the kernel's hands."""
        self._disk.close(self.fd)


@dataclass
class JournalContent:
    """What was found in a journal file."""

    path: Path
    header: JournalHeader | None = None
    num_rows: int = 0
    """Good rows of all tables."""
    lost: int = 0
    """Frames known to be missing or bad before the last good one."""
    faults: list[str] = field(default_factory=list)
    """What is wrong, for people; the last one may say how many more there are."""
    newer: str = ""
    """Where a newer loopscope wrote the file in another format: what is to be said of it. Its rows are not lost."""
    torn: bool = False
    """True where the file ends inside a frame: at most one row, whose append had not returned."""


def read_journal(path: Path) -> bytes:
    """The bytes of a journal file, which may be growing. Raises OSError; a symbolic link is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def decode_journal(
    path: Path, data: bytes, tables: Mapping[str, TableSchema], take: TakeRow
) -> JournalContent:
    """Hand every good row to `take`; damage is named in `faults` and counted in `lost`.

    Rows come without null columns and without the keys that every row shares.

    Args:
        path: of the file, for messages.
        data: its content.
        tables: the registry; it knows the columns of a table whose first row in the file is damaged.
        take: takes a table's name and a row.
    """
    content = JournalContent(path)
    rows = _Rows(content, tables, take)
    expected = 0
    for piece in scan(data):
        if isinstance(piece, Gap):
            if piece.torn and piece.end == len(data):
                content.torn = True
                continue
            content.faults.append(f"{path.name}: bytes {piece.start} to {piece.end} are damaged")
            content.lost += piece.end == len(data)
            continue
        if piece.ordinal != expected:
            missing = piece.ordinal - expected
            content.faults.append(f"{path.name}: {missing} record(s) missing before record {piece.ordinal}")
            content.lost += max(missing, 0)
        expected = piece.ordinal + 1
        rows.decode(piece)
        if (header := content.header) is not None and header.format > FORMAT:
            content.newer = newer_format(header)
            break
    if (more := len(content.faults) - _SHOWN) > 0:
        content.faults[_SHOWN:] = [f"{path.name}: {more} more"]
    return content


def newer_format(header: JournalHeader) -> str:
    """What is to be said of a journal that this version cannot read; empty where it can."""
    if header.format <= FORMAT:
        return ""
    return (
        f"is a journal of format {header.format}, written by loopscope {header.loopscope_version}; this version reads "
        f"formats up to {FORMAT}. Read and seal it with that version or a later one"
    )


class _Rows:
    """Frames to rows."""

    def __init__(self, content: JournalContent, tables: Mapping[str, TableSchema], take: TakeRow) -> None:
        self._content = content
        self._tables = tables
        self._take = take
        self._orders: dict[str, tuple[str, ...]] = {}

    def decode(self, frame: Frame) -> None:
        """Take one frame; what is wrong with it is counted."""
        try:
            if frame.ordinal == 0:
                self._content.header = _HEADER.decode(frame.payload)
            else:
                self._row(*_ROW.decode(frame.payload))
                self._content.num_rows += 1
        except (msgspec.DecodeError, ValueError) as error:
            name = self._content.path.name
            self._content.faults.append(f"{name}: record {frame.ordinal} cannot be decoded ({error})")
            self._content.lost += 1

    def _row(self, table: str, row: dict[str, Any] | list[Any]) -> None:
        if isinstance(row, dict):
            self._orders[table] = tuple(row)
            values: list[Any] = [*row.values()]
        else:
            values = row
        names = self._orders.get(table, ())
        if len(names) != len(values):
            schema = self._tables.get(table)
            names = schema.orders.get(len(values), ()) if schema is not None else ()
            if not names:
                raise ValueError(
                    f"a row of {table!r} has {len(values)} values, and the row with their names is lost"
                )
        self._take(table, {n: v for n, v in zip(names, values, strict=True) if v is not None})


def journal_header(data: bytes) -> JournalHeader | None:
    """What the first record says; None where it is damaged."""
    first = next(scan(data), None)
    if isinstance(first, Frame) and first.ordinal == 0:
        with contextlib.suppress(msgspec.DecodeError):
            return _HEADER.decode(first.payload)
    return None


def holds_row_of(data: bytes, tables: Collection[str]) -> bool:
    """True where the journal holds a row of one of the tables; stops at the first."""
    for piece in scan(data):
        if isinstance(piece, Frame) and piece.ordinal > 0:
            with contextlib.suppress(msgspec.DecodeError):
                if _TABLE.decode(piece.payload)[0] in tables:
                    return True
    return False
