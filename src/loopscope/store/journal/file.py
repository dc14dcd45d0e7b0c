"""The journal: an append-only file of frames that this process alone writes.

The first frame is the header. Every other one is a row: its table, and its values in the order of the table's columns.
The first row of each table holds the columns' names too, so that a reader of another version knows them.
"""

import contextlib
import errno
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loopscope.store.disk import Disk, write_all
from loopscope.store.journal.frames import JournalHeader, encode_frame, encode_frames

_encode = msgspec.msgpack.Encoder().encode
_values = msgspec.structs.astuple
_named = msgspec.structs.asdict


def read_journal(path: Path) -> bytes:
    """The bytes of a journal file, which may be growing. Raises OSError, also for what is no file and would block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is no file", str(path))
    return path.read_bytes()


class Journal:
    """An open journal file. `append` either keeps the whole row or leaves the file as it was."""

    def __init__(self, disk: Disk, path: Path, header: JournalHeader) -> None:
        """Create the file; raises OSError, and leaves no file behind where it can help it."""
        self._disk, self.path = disk, path
        self.fd = disk.create(path)
        self.size = self.rows = 0
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
            payloads = [_encode((table, _named(rows[0]))), *[_encode((table, _values(r))) for r in rows[1:]]]
            self._write(encode_frames(self._ordinal, payloads), count)
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
            # A signal or an almost full disk may take a part: try the rest, which then fails with the reason.
            if (taken := self._disk.write(self.fd, data)) < len(data):
                write_all(self._disk, self.fd, data[taken:])
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                self._repair()
            raise
        self._ordinal += count
        self.size += len(data)
        self.dirty = True

    def _repair(self) -> None:
        """Cut a half-written frame off, so that the next one follows the last whole one."""
        self._disk.truncate(self.fd, self.size)
        self._torn = False

    def fsync(self, fd: int) -> None:
        """Put what was written on the disk, and the first time the file's name. Raises OSError.

        Args:
            fd: a descriptor of the file; a duplicate where the journal's own may be closed during the call.
        """
        self._disk.fsync(fd)
        if not self.named:
            self._disk.fsync_dir(self.path.parent)
            self.named = True
