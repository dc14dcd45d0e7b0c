"""The journal: an append-only file of frames that this process alone writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from loopscope.store.disk import Disk
from loopscope.store.frames import Frame, Gap, encode_frame, encode_frames, scan


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame: enough to read the rows when everything else is gone."""

    format: int = 1
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
_ROW = msgspec.msgpack.Decoder(tuple[str, dict[str, Any]])


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
        self._ordinal = 0
        self._torn = False
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
        if count == 1:
            # Every step's loss row comes alone: making a list of one costs as much as its frame.
            data = encode_frame(self._ordinal, _encode((table, rows[0])))
        else:
            data = encode_frames(self._ordinal, [_encode((table, row)) for row in rows])
        self._write(data, count)
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
    """What is wrong, for people."""
    torn: bool = False
    """True where the file ends inside a frame: at most one row, whose append had not returned."""


def read_journal(path: Path) -> bytes:
    """The bytes of a journal file, which may be growing. Raises OSError; a symbolic link is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def decode_journal(path: Path, data: bytes, take: TakeRow) -> JournalContent:
    """Hand every good row to `take`; damage is named in `faults` and counted in `lost`.

    Rows come as they were appended: null columns and the keys that every row shares are left out.
    """
    content = JournalContent(path)
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
        _take(content, piece, take)
    return content


def _take(content: JournalContent, frame: Frame, take: TakeRow) -> None:
    try:
        if frame.ordinal == 0:
            content.header = _HEADER.decode(frame.payload)
        else:
            take(*_ROW.decode(frame.payload))
            content.num_rows += 1
    except msgspec.DecodeError as error:
        content.faults.append(f"{content.path.name}: record {frame.ordinal} cannot be decoded ({error})")
        content.lost += 1


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
                if _ROW.decode(piece.payload)[0] in tables:
                    return True
    return False
