"""The journals of one writer, one after the other: begun, rotated, made durable, and missed where they vanish."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from loopscope import __version__
from loopscope.errors import StoreError
from loopscope.store.checksum import decode_document
from loopscope.store.disk import Disk
from loopscope.store.folder import RunFolder
from loopscope.store.journal.file import Journal
from loopscope.store.journal.frames import JournalHeader
from loopscope.store.manifest import Attempt
from loopscope.store.names import JOURNAL_DIR, Segment, parse_journal
from loopscope.store.options import StoreOptions
from loopscope.store.parts.parquet import Ledger
from loopscope.store.schema import TableSchema


def header_of(
    attempt: Attempt, run_id: str, writer: str, seq: int, tables: Mapping[str, TableSchema]
) -> JournalHeader:
    """The header of a writer's journals; `seq` is the last number in use."""
    return JournalHeader(
        run_id=run_id,
        attempt=attempt.attempt,
        parent_attempt=attempt.parent_attempt,
        first_step=attempt.first_step,
        world_size=attempt.world_size,
        writer=writer,
        seq=seq,
        schemas={name: schema.version for name, schema in tables.items()},
        loopscope_version=__version__,
    )


class JournalChain:
    """Journals numbered without a gap; rows go to the newest.

    Args:
        folder: the run.
        header: of the journals; `seq` is the last number in use.
        disk: where.
        options: of the store.
        mutex: the writer's, held by callers of `append`, `retire` and `removed_rows`.
        on_rotated: called with the name of each journal that may be sealed.
    """

    def __init__(
        self,
        folder: RunFolder,
        header: JournalHeader,
        disk: Disk,
        options: StoreOptions,
        mutex: threading.Lock,
        on_rotated: Callable[[str], None],
    ) -> None:
        self._folder, self._header, self._disk, self._options = folder, header, disk, options
        self._mutex, self._on_rotated = mutex, on_rotated
        self._journal: Journal | None = None
        self._retired: deque[Journal] = deque()
        # Held while retired journals are synced and closed, so that they are announced in order, and so that a caller
        # that wants rows durable waits for a journal that another thread is syncing.
        self._settling = threading.Lock()
        self._seq = header.seq
        self._opened = self._synced = time.monotonic()
        self.bytes_written = 0
        """Bytes of all journals so far."""
        self.fsync_failures = 0
        """Times that the disk refused to make rows durable; they are still with the kernel."""
        self.last_error = ""
        """Why it refused last."""

    def append(self, table: str, rows: Sequence[msgspec.Struct]) -> None:
        """Write rows, all or none. OSError or StoreError where they are not in a file."""
        journal = self._journal or self._begin()
        before = journal.size
        journal.append(table, rows)
        self.bytes_written += journal.size - before
        if journal.size >= self._options.rotate_bytes:
            self.retire()

    def retire(self) -> None:
        """Start a new file with the next row. The old one is synced and closed in the background, which is slow."""
        journal, self._journal = self._journal, None
        if journal is not None:
            self._retired.append(journal)

    def retire_old(self) -> None:
        """The same for a file of a certain age."""
        journal = self._journal
        if journal is not None and journal.rows and time.monotonic() - self._opened >= self._options.rotate_s:
            self.retire()

    def settle(self) -> None:
        """Sync, close and announce what was retired. Without the mutex."""
        with self._settling:
            while self._retired:
                journal = self._retired.popleft()
                self._fsync(journal, journal.fd)
                with contextlib.suppress(OSError):
                    self._disk.close(journal.fd)
                self._on_rotated(journal.path.name)

    def sync(self, every_s: float = 0.0) -> bool:
        """Make rows durable without holding up `append`, which has the mutex: on a descriptor of its own.

        Args:
            every_s: nothing where the last time was less than this ago.
        """
        with self._mutex:
            if time.monotonic() - self._synced < every_s:
                return True
            self._synced = time.monotonic()
            journal = self._journal
            if journal is None or not journal.dirty:
                return True
            try:
                fd = os.dup(journal.fd)
            except OSError as error:
                self.last_error = f"dup: {error}"
                return False
            journal.dirty = False
        try:
            if not self._fsync(journal, fd):
                journal.dirty = True
                return False
        finally:
            os.close(fd)
        return True

    def removed_rows(self) -> int | None:
        """Rows lost with a file that was deleted while it was written, to which writes succeed; None where it is there.

        The next row begins another file. Rows that somebody sealed before the file went are not lost.
        """
        journal = self._journal
        if journal is None or _is_linked(journal.fd) or journal.path.exists():
            return None
        self._journal = None
        self.last_error = f"{JOURNAL_DIR}/{journal.path.name} was deleted while it was being written"
        with contextlib.suppress(OSError):
            self._disk.close(journal.fd)
        return max(0, journal.rows - self._rows_sealed(journal))

    def _rows_sealed(self, journal: Journal) -> int:
        segment = parse_journal(journal.path.name)
        try:
            assert segment is not None
            data = journal.path.with_name(segment.ledger).read_bytes()
            return sum(decode_document(data, Ledger).rows.values())
        except (OSError, ValueError):
            return 0

    def _begin(self) -> Journal:
        if self._folder.is_gone():
            raise StoreError(
                f"the run directory {self._folder.path} was deleted, or moved to another disk, while it was being "
                "written; what it held is lost unless a copy was made. End the training, or start a new run"
            )
        self._seq += 1
        header = msgspec.structs.replace(self._header, seq=self._seq)
        path = self._folder.pinned / JOURNAL_DIR / Segment(header.attempt, header.writer, header.seq).journal
        try:
            # Where only this folder was deleted: what comes from here on is still worth keeping.
            if not path.parent.exists():
                self._disk.mkdir(path.parent)
            self._journal = Journal(self._disk, path, header)
        except OSError:
            if not path.exists():
                # Nothing has this number: the next file takes it, or its absence would look like a loss.
                self._seq -= 1
            raise
        self._opened = time.monotonic()
        return self._journal

    def _fsync(self, journal: Journal, fd: int) -> bool:
        try:
            journal.fsync(fd)
        except OSError as error:
            self.fsync_failures += 1
            self.last_error = f"fsync: {error}"
            return False
        return True


def _is_linked(fd: int) -> bool:
    try:
        return os.fstat(fd).st_nlink > 0
    except OSError:
        return False  # ESTALE: another host removed it.
