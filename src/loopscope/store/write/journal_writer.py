"""The writer of one process: rows go to its journal."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from loopscope.errors import SchemaError, StoreError
from loopscope.store.disk import Disk
from loopscope.store.journal.file import Journal
from loopscope.store.journal.frames import JournalHeader
from loopscope.store.locks import Lock
from loopscope.store.names import JOURNAL_DIR, Segment
from loopscope.store.options import StoreOptions
from loopscope.store.schema import TableSchema
from loopscope.store.write.row_check import RowMender

OnError = Literal["record", "raise"]
_log = logging.getLogger("loopscope.store")
_convert = msgspec.convert


class JournalWriter:
    """Appends rows of every table to this process's journal.

    `append` encodes the row and hands it to the kernel; it never waits for the disk. A row that it took survives
    the death of the process, and after `fsync_s` the death of the machine.

    Under ``on_error="record"`` no method raises for a row or a disk: what could not be written is counted in
    `dropped`, and the count is written as a health row as soon as there is space again. A forked child's copy
    does nothing.

    Made by `RunStore.writer`.
    """

    def __init__(
        self,
        *,
        root: Path,
        header: JournalHeader,
        tables: Mapping[str, TableSchema],
        disk: Disk,
        lock: Lock,
        options: StoreOptions,
        on_rotated: Callable[[str], None],
        on_closed: Callable[[JournalWriter], None],
        seal_on_close: Callable[[JournalWriter], None],
    ) -> None:
        self._root, self._header, self._tables = root, header, tables
        self._disk, self._lock, self._options = disk, lock, options
        self._on_rotated, self._on_closed, self._seal_on_close = on_rotated, on_closed, seal_on_close
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._journal: Journal | None = None
        self._retired: deque[Journal] = deque()
        # Held while retired journals are synced and closed, so that they are announced in order, and so that a caller
        # that wants rows durable waits for a journal that another thread is syncing.
        self._settling = threading.Lock()
        self._seq = header.seq
        self._opened = self._synced = time.monotonic()
        self._reported: dict[str, int] = {}
        self._mender = RowMender()
        self.on_error: OnError = options.on_error
        self.run_id, self.attempt = header.run_id, header.attempt
        self.name = header.writer
        """The writer's name in file names."""
        self.closed = False
        self.last_step = 0
        """Step of the last row that was written; 0 before the first."""
        self.attempted = 0
        """Rows handed to `append`."""
        self.dropped = 0
        """Rows that could not be written."""
        self.last_error: str | None = None
        """Why the last dropped row was dropped, or the last fsync failed; text."""
        self.fsync_failures = 0
        """Times that the disk refused to make rows durable; they are still with the kernel."""

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Write one row; missing columns are null, and run_id, attempt and wall_time are filled in.

        Scalars of NumPy, torch and pandas are taken for what they are, arrays of one dimension as lists. Under "record"
        a value that does not fit its column (NaN and ±inf fit none) is null, with its reason in `null_reasons`: it is
        logged at once, and counted in a health row `nonfinite` or `bad_value`. A row with an unknown column, or without
        one that it needs, is dropped.

        Raises:
            SchemaError: under "raise", where a column is unknown or a value does not fit it.
            StoreError: under "raise", where the disk refused the row or the writer is closed.
        """
        if os.getpid() != self._pid:
            return
        with self._mutex:
            self.attempted += 1
            # Nearly every call of a run comes here: no list, no loop.
            try:
                typed = self.check(table, row)
            except Exception as error:  # noqa: BLE001 - nothing may reach the training loop
                failed: StoreError | None = self._refuse(table, error)
            else:
                failed = self._take(table, (typed,))
        if failed is not None and self.on_error == "raise":
            raise failed

    def append_many(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """The same for several rows of one table, in one system call. A bad row takes no other along.

        Raises:
            SchemaError, StoreError: as `append`, after the other rows were written.
        """
        if os.getpid() != self._pid:
            return
        with self._mutex:
            self.attempted += len(rows)
            good: list[msgspec.Struct] = []
            failed: StoreError | None = None
            now = datetime.now(UTC)
            for row in rows:
                try:
                    good.append(self.check(table, row, now))
                except Exception as error:  # noqa: BLE001 - the same
                    failed = self._refuse(table, error)
            if good or self.closed:
                failed = self._take(table, good) or failed
        if failed is not None and self.on_error == "raise":
            raise failed

    def _refuse(self, table: str, error: Exception, rows: int = 1) -> StoreError:
        """Count rows that cannot be written, and say why."""
        reason = error if isinstance(error, StoreError) else StoreError(f"table {table!r}: {error!r}")
        self.last_error = f"{type(reason).__name__}: {reason}"
        if not self.dropped and self.on_error == "record":
            _log.warning("loopscope: a row of writer %s is lost, and counted: %s", self.name, self.last_error)
        self.dropped += rows
        return reason

    def _take(self, table: str, typed: Sequence[msgspec.Struct]) -> StoreError | None:
        """Write rows, or say why they were dropped."""
        try:
            if self.closed:
                raise StoreError(f"writer {self.name!r} is closed; expected no row after close()")
            self._write(table, typed)
        except Exception as error:  # noqa: BLE001 - the same
            return self._refuse(table, error, len(typed))
        return None

    def check(self, table: str, row: Mapping[str, object], now: datetime | None = None) -> msgspec.Struct:
        """The row in its typed form; `now` is its wall_time where it has none of its own.

        Raises:
            SchemaError: it does not fit the table.
        """
        schema = self._tables.get(table)
        if schema is None:
            raise SchemaError(f"there is no table {table!r}; expected one of {sorted(self._tables)}")
        try:
            typed: Any = _convert(row, schema.row_type)
        except (msgspec.ValidationError, TypeError):
            typed = self._mender.mend(schema, row, strict=self.on_error == "raise")
        if typed.run_id is not None or typed.attempt is not None:
            self._check_owner(table, typed)
        if typed.wall_time is None:
            typed.wall_time = now or datetime.now(UTC)
        return typed  # type: ignore[no-any-return]

    def _check_owner(self, table: str, typed: Any) -> None:
        if typed.run_id not in (None, self.run_id) or typed.attempt not in (None, self.attempt):
            raise SchemaError(
                f"a row of table {table!r} belongs to run {typed.run_id!r}, attempt {typed.attempt!r}; this "
                f"writer writes run {self.run_id!r}, attempt {self.attempt}. Leave both out: the writer knows them."
            )
        # Said once, in the journal's header.
        typed.run_id = typed.attempt = None

    def flush(self, durable: bool = False) -> None:
        """Rows are with the kernel already; `durable` also waits until they are on the disk.

        Raises:
            StoreError: under "raise", where the disk refused.
        """
        if os.getpid() != self._pid:
            return
        self._report()
        if not durable:
            return
        synced = self._sync()
        # Last, so that a journal that another thread retires during the fsync is waited for as well.
        self._settle_retired()
        if not synced and self.on_error == "raise":
            raise StoreError(f"rows of writer {self.name!r} could not be made durable: {self.last_error}")

    def close(self, seal: bool = True) -> None:
        """Write what is left, make it durable, seal it, give the writer's files back. A second call does nothing."""
        if os.getpid() != self._pid or self.closed:
            return
        self._notice_removal()
        self._report()
        with self._mutex:
            self.closed = True
            self._retire()
        self._settle_retired()
        if self.dropped:
            _log.warning(
                "loopscope: %d of %d rows of writer %s could not be written (%s)",
                self.dropped, self.attempted, self.name, self.last_error,
            )  # fmt: skip
        if seal:
            try:
                self._seal_on_close(self)
            except Exception as error:
                self.last_error = f"{type(error).__name__}: {error}"
                _log.warning("loopscope: sealing failed, the journal is kept (%s)", self.last_error)
                if self.on_error == "raise":
                    raise StoreError(f"sealing failed, the journal is kept: {error}") from error
        self._lock.release()
        self._on_closed(self)

    def tick(self) -> None:
        """What the background thread runs at every tick: fsync by time, rotation by age, the count of dropped rows."""
        self._lock.beat()
        now = time.monotonic()
        self._notice_removal()
        self._settle_retired()
        self._report()
        if now - self._synced >= self._options.fsync_s:
            self._sync()
        with self._mutex:
            journal = self._journal
            if journal is not None and journal.rows and now - self._opened >= self._options.rotate_s:
                self._retire()

    def _notice_removal(self) -> None:
        """Writes to a deleted file succeed: count its rows as lost, and start another file."""
        with self._mutex:
            journal = self._journal
            if journal is None or os.fstat(journal.fd).st_nlink > 0 or journal.path.exists():
                return
            self._journal = None
            self.dropped += journal.rows
            self.last_error = f"{journal.path} was deleted while it was being written"
        with contextlib.suppress(OSError):
            self._disk.close(journal.fd)

    def _write(self, table: str, rows: Sequence[Any]) -> None:
        journal = self._journal or self._begin_journal()
        journal.append(table, rows)
        self.last_step = rows[-1].step
        if journal.size >= self._options.rotate_bytes:
            self._retire()

    def _begin_journal(self) -> Journal:
        self._seq += 1
        header = msgspec.structs.replace(self._header, seq=self._seq)
        path = self._root / JOURNAL_DIR / Segment(header.attempt, header.writer, header.seq).journal
        try:
            # Where the folder was deleted under the run: what comes from here on is still worth keeping.
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

    def _retire(self) -> None:
        """Start a new file with the next row. The old one is synced and closed in the background, which is slow."""
        journal, self._journal = self._journal, None
        if journal is not None:
            self._retired.append(journal)

    def _settle_retired(self) -> None:
        with self._settling:
            while self._retired:
                journal = self._retired.popleft()
                self._fsync(journal, journal.fd)
                with contextlib.suppress(OSError):
                    self._disk.close(journal.fd)
                self._on_rotated(journal.path.name)

    def _fsync(self, journal: Journal, fd: int) -> bool:
        try:
            journal.fsync(fd)
        except OSError as error:
            self.fsync_failures += 1
            self.last_error = f"fsync: {error}"
            return False
        return True

    def _sync(self) -> bool:
        """fsync without holding up `append`: on a descriptor of its own, outside the lock."""
        with self._mutex:
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

    def _report(self) -> None:
        """Write how much went wrong since this was last written; try again later where that fails."""
        with self._mutex:
            if self.closed:
                return
            totals: dict[str, int] = {"dropped_rows": self.dropped, "fsync_failed": self.fsync_failures}
            for event, total in (totals | self._mender.counts).items():
                count = total - self._reported.get(event, 0)
                if count <= 0:
                    continue
                step, detail = self._mender.last.get(event, (self.last_step, self.last_error))
                row = {"step": step, "event": event, "severity": "critical", "count": count, "detail": detail}
                try:
                    self._write("health", [self.check("health", row)])
                    self._reported[event] = total
                except Exception as error:  # noqa: BLE001 - it stays counted, the next try comes soon
                    self.last_error = f"{type(error).__name__}: {error}"
