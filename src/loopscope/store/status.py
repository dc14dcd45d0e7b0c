"""What a process says about itself: its lock file while it writes, which is its record once it has ended.

The file has a fixed size and every block of it is written when it is made, so that what it says later, how many rows
were lost or which signal came, needs no space on a disk that is full:

* the holder, one line of JSON, padded;
* two lines in turn for the status, each with its own checksum: a write that was cut short leaves the other one;
* for each signal that is recorded, a block that the signal's handler writes into, in C, before anything else.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from loopscope.store.checksum import decode_document, encode_document
from loopscope.store.ids import Process
from loopscope.store.names import ATTEMPTS_DIR, JOURNAL_DIR

_HEAD = 1024
_SLOT = 1536
_PLAIN = _HEAD + 2 * _SLOT
_AREA = 4096
_LONGEST_TEXT = 400
_NAME = re.compile(
    r"(?P<name>owner|(?P<attempt>\d{1,9})-(?P<writer>[A-Za-z0-9_]{1,64}))\.\d{1,9}\.(lock|end)"
)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a lock file: who made it."""

    process: Process
    started: datetime
    run_id: str
    inode: int | None = None
    """Of the file itself: a copy of the folder has another one, and its maker does not hold it."""
    signals: list[str] = []
    """Names of the signals that are recorded, in the order of their blocks."""
    preempting: list[str] = []
    """Those of them that the scheduler sends before it takes the machine away."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a process said last."""

    count: int = 0
    """How often it said something; the higher line counts."""
    ended: Literal["", "closed", "died"] = ""
    """"closed": it gave the run back; "died": somebody on its own machine saw that it was gone; "": neither."""
    error: str = ""
    """The exception that ended it."""
    after_signal: bool = False
    """True where a signal had come before that exception, which then is its consequence."""
    signal: str = ""
    """A signal that reached it as an exception (SIGINT)."""
    preempted_by: str = ""
    """The file or the variable by which the scheduler said that it takes the machine away."""
    superseded_by: int | None = None
    """The attempt that took the run over while this process lived."""
    reclaimed: int = 0
    """How often it found its lock taken for a dead process's, and made another."""
    attempted: int = 0
    """Rows it was given."""
    dropped: int = 0
    """Rows of them that are lost."""
    fsync_failures: int = 0
    last_step: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A lock file, or what became of one, as it was found."""

    path: Path
    name: str
    """"owner", or attempt and writer as in the names of journals."""
    attempt: int | None
    """None for the owner of the run."""
    writer: str
    held: bool
    """True while the file lies where locks lie."""
    holder: Holder | None
    """None where it cannot be read."""
    status: Status
    signals: tuple[str, ...]
    """Names of the signals that came."""
    touched_ns: int
    """When it was written or touched last, by the file system's clock."""
    own_file: bool
    """False where the file is a copy of the one that the holder made."""

    @property
    def known(self) -> bool:
        """True where the counts in `status` were ever written."""
        return self.status.count > 0

    def alive(self) -> bool | None:
        """Whether the process lives and holds this very file; None where it cannot be asked."""
        if self.status.ended:
            return False
        alive = None if self.holder is None else self.holder.process.alive()
        return None if alive and not self.own_file else alive


def blank(holder: Holder) -> bytes:
    """The content of a new lock file. ValueError where the holder does not fit."""
    return b"".join(
        (
            _line(msgspec.json.encode(holder), _HEAD),
            *[_line(b"", _SLOT)] * 2,
            bytes(_AREA * len(holder.signals)),
        )
    )


def slot_of(status: Status) -> tuple[bytes, int]:
    """The line of a status, and where in the file it goes."""
    cut = {n: getattr(status, n)[:_LONGEST_TEXT] for n in ("error", "preempted_by", "last_error")}
    line = encode_document(msgspec.structs.replace(status, **cut))
    if len(line) >= _SLOT:  # Text of signs that take several bytes each.
        ascii_only = {n: t.encode("ascii", "replace").decode()[:200] for n, t in cut.items()}
        line = encode_document(msgspec.structs.replace(status, **ascii_only))
    return _line(line, _SLOT), _HEAD + status.count % 2 * _SLOT


def area_of(index: int) -> int:
    """Where the block of the signal with this index begins."""
    return _PLAIN + index * _AREA


def plain_size() -> int:
    """Bytes before the blocks of signals."""
    return _PLAIN


def read_record(path: Path) -> Record | None:
    """The record in a file; None where it is no more, or is not named as one.

    Raises:
        OSError: it cannot be read.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    try:
        # Opening first makes a network file system look again instead of answering from its cache.
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            data = file.read()
    except FileNotFoundError:
        return None
    holder = _holder_of(data)
    return Record(
        path=path,
        name=match["name"],
        attempt=None if match["attempt"] is None else int(match["attempt"]),
        writer=match["writer"] or "",
        held=path.name.endswith(".lock"),
        holder=holder,
        status=_status_of(data),
        signals=_signals_of(data, holder.signals if holder else ()),
        touched_ns=stat.st_mtime_ns,
        own_file=holder is None or holder.inode in (None, stat.st_ino),
    )


def read_records(root: Path, attempt: int | None = None) -> list[Record]:
    """The records of a run: locks first, then what processes left when they ended.

    Args:
        root: the run directory.
        attempt: leaves out those of other attempts; the owner's is always there.

    Raises:
        OSError: a folder or a file cannot be read.
    """
    found = []
    for folder in (JOURNAL_DIR, ATTEMPTS_DIR):
        try:
            names = sorted(os.listdir(root / folder))  # noqa: PTH208 - names alone are wanted
        except FileNotFoundError:
            continue
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None or (attempt is not None and match["attempt"] not in (None, f"{attempt:05d}")):
                continue
            if (record := read_record(root / folder / name)) is not None:
                found.append(record)
    return found


def _line(content: bytes, size: int) -> bytes:
    content = content.rstrip()
    if len(content) >= size:
        raise ValueError(f"{len(content)} bytes do not fit into a line of {size}")
    return content.ljust(size - 1) + b"\n"


def _holder_of(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data.split(b"\n", 1)[0], type=Holder)
    except msgspec.DecodeError:
        return None


def _status_of(data: bytes) -> Status:
    found = [Status()]
    for line in data[: 2 * _PLAIN].split(b"\n", 3)[1:3]:
        try:
            found.append(decode_document(line.rstrip(), Status))
        except ValueError:
            continue
    return max(found, key=lambda status: status.count)


def _signals_of(data: bytes, names: Sequence[str]) -> tuple[str, ...]:
    # A block begins with zeros until its signal comes; what ran over from the block before it does not count.
    starts = [area_of(index) for index in range(len(names))]
    return tuple(
        name
        for name, start in zip(names, starts, strict=True)
        if data[start : start + 1] not in (b"", b"\0") and (start == _PLAIN or data[start - 1] == 0)
    )
