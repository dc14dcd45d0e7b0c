"""The writer of one process: rows go to its journal."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from loopscope.errors import SchemaError, StoreError, SupersededError
from loopscope.store.disk import Disk
from loopscope.store.folder import RunFolder
from loopscope.store.journal.frames import JournalHeader
from loopscope.store.locks import Lock
from loopscope.store.options import StoreOptions
from loopscope.store.preemption import Notices
from loopscope.store.schema import TableSchema
from loopscope.store.write import endings
from loopscope.store.write.journal_chain import JournalChain
from loopscope.store.write.row_check import RowMender
from loopscope.store.write.space import SpaceForecast
from loopscope.store.write.standing import Standing

OnError = Literal["record", "raise"]
_log = logging.getLogger("loopscope.store")

_LOOK_S = 0.05
"""How long a writer takes for granted that its folder and its attempt are what they were. A process that was paused
looks before its next row."""
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
        folder: RunFolder,
        header: JournalHeader,
        tables: Mapping[str, TableSchema],
        disk: Disk,
        lock: Lock,
        options: StoreOptions,
        on_rotated: Callable[[str], None],
        on_closed: Callable[[JournalWriter], None],
        seal_on_close: Callable[[JournalWriter], None],
    ) -> None:
        self._tables, self.lock, self._options = tables, lock, options
        self._on_closed, self._seal_on_close = on_closed, seal_on_close
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._chain = JournalChain(folder, header, disk, options, self._mutex, on_rotated)
        self._notices = Notices(options.preempted_by)
        self._standing = Standing(folder, header.attempt)
        self._look_at = 0.0
        self._warn_at = 1
        self._reported: dict[str, int] = {}
        self.space: SpaceForecast | None = None
        """How long the disk lasts; of one writer of a run."""
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
        self.superseded_by: int | None = None
        """The attempt that took the run over while this one wrote, and whose rows replace this one's."""

    @property
    def fsync_failures(self) -> int:
        """Times that the disk refused to make rows durable; they are still with the kernel."""
        return self._chain.fsync_failures

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Write one row; missing columns are null, and run_id, attempt and wall_time are filled in.

        Scalars of NumPy, torch and pandas are taken for what they are, arrays of one dimension as lists. Under "record"
        a value that does not fit its column (NaN and ±inf fit none) is null, with its reason in `null_reasons`: it is
        logged at once, and counted in a health row `nonfinite` or `bad_value`. A row with an unknown column, or without
        one that it needs, is dropped.

        Raises:
            SchemaError: under "raise", where a column is unknown or a value does not fit it.
            StoreError: under "raise", where the disk refused the row or the writer is closed.
            SupersededError: under "raise", where another process has taken the run over; the row is written.
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
        if self.on_error == "raise":
            self._raise(failed)

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
        if self.on_error == "raise":
            self._raise(failed)

    def _raise(self, failed: StoreError | None) -> None:
        if failed is not None:
            raise failed
        if self.superseded_by is not None:
            raise SupersededError(
                f"attempt {self.attempt} of run {self.run_id} was superseded by attempt {self.superseded_by}: another "
                "process has taken the run over, and its rows replace those of this one. End this training."
            )

    def _refuse(self, table: str, error: Exception, rows: int = 1) -> StoreError:
        """Count rows that cannot be written, and say why."""
        reason = error if isinstance(error, StoreError) else StoreError(f"table {table!r}: {error!r}")
        self.last_error = f"{type(reason).__name__}: {reason}"
        self.dropped += rows
        if self.on_error == "record":
            self._warn()
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
        endings.check()
        if not durable:
            return
        synced = self._chain.sync()
        # Last, so that a journal that another thread retires during the fsync is waited for as well.
        self._chain.settle()
        if not synced and self.on_error == "raise":
            raise StoreError(
                f"rows of writer {self.name!r} could not be made durable: {self._chain.last_error}"
            )

    def close(self, seal: bool = True) -> None:
        """Write what is left, make it durable, seal it, give the writer's files back. A second call does nothing."""
        if os.getpid() != self._pid or self.closed:
            return
        endings.note(self.lock, sys.exception())
        with self._mutex:
            self._look()
        self._report()
        with self._mutex:
            self.closed = True
            self._chain.retire()
        self._chain.settle()
        if self.dropped:
            _log.warning(
                "loopscope: %d of %d rows of writer %s could not be written (%s)",
                self.dropped, self.attempted, self.name, self.last_error,
            )  # fmt: skip
        try:
            if seal:
                self._seal_on_close(self)
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            _log.warning("loopscope: sealing failed, the journal is kept (%s)", self.last_error)
            if self.on_error == "raise":
                raise StoreError(f"sealing failed, the journal is kept: {error}") from error
        finally:
            self.lock.note(**self._counts())
            self.lock.release(keep=f"{self.attempt:05d}-{self.name}")
            self._on_closed(self)

    def tick(self) -> None:
        """What the background thread runs at every tick: fsync by time, rotation by age, the count of dropped rows."""
        self.lock.beat()
        self.lock.keep_hold()
        with self._mutex:
            self._look()
        self._chain.settle()
        self._report()
        self._chain.sync(self._options.fsync_s)
        with self._mutex:
            self._chain.retire_old()
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Say that the disk is filling up, while there is space to say it."""
        forecast = None if self.space is None else self.space.look()
        if forecast is not None:
            _log.warning("loopscope: the disk is filling up: %s", forecast.detail)
            with self._mutex:
                self._note(
                    "disk_filling", severity=forecast.severity, value=forecast.hours, detail=forecast.detail
                )

    def _look(self, pending: int = 0) -> None:
        """See whether what is written still counts; `pending` rows are about to be written. Under the mutex."""
        self._look_at = time.monotonic() + _LOOK_S
        if self._standing.is_gone():
            lost = self.attempted - self.dropped - pending
            self._chain.removed_rows()
            self._lose(lost, f"the run directory {self._standing.path} was deleted, or moved to another disk")
        elif (rows := self._chain.removed_rows()) is not None:
            self._lose(rows, self._chain.last_error)
        if self.superseded_by is None and (newer := self._standing.successor()) is not None:
            self.superseded_by = newer.attempt
            text = self._standing.describe(newer)
            self.lock.note(superseded_by=newer.attempt)
            _log.critical("loopscope: %s", text)
            self._note("superseded", count=newer.attempt, detail=text)

    def _lose(self, rows: int, reason: str) -> None:
        """Count rows that were written and are gone, and say so at once."""
        if rows > 0:
            self.dropped += rows
            self.last_error = reason
            self._warn()

    def _warn(self) -> None:
        """Say in the log how much is lost: the first time, and each time that it is ten times as much."""
        if self.dropped >= self._warn_at:
            self._warn_at = 10 * self.dropped
            _log.critical(
                "loopscope: %d of %d rows of writer %s are lost (%s)",
                self.dropped, self.attempted, self.name, self.last_error,
            )  # fmt: skip

    def _write(self, table: str, rows: Sequence[Any]) -> None:
        if time.monotonic() >= self._look_at:
            self._look(len(rows))
        self._chain.append(table, rows)
        self.last_step = rows[-1].step

    def _note(self, event: str, **more: object) -> bool:
        """Write a health row of the writer's own; False where it could not be written. Under the mutex."""
        row = {"step": self.last_step, "event": event, "severity": "critical", **more}
        try:
            self._write("health", [self.check("health", row)])
        except Exception as error:  # noqa: BLE001 - it stays counted, the next try comes soon
            self.last_error = f"{type(error).__name__}: {error}"
            return False
        return True

    def _report(self) -> None:
        """Write how much went wrong since this was last written; try again later where that fails.

        The lock's file takes the counts also where no row fits on the disk any more.
        """
        with self._mutex:
            if self.closed:
                return
            totals: dict[str, int] = {"dropped_rows": self.dropped, "fsync_failed": self.fsync_failures}
            for event, total in (*totals.items(), *self._mender.counts.items()):
                count = total - self._reported.get(event, 0)
                step, detail = self._mender.last.get(event, (self.last_step, self.last_error))
                if count > 0 and self._note(event, step=step, count=count, detail=detail):
                    self._reported[event] = total
            self.lock.note(**self._counts())

    def _counts(self) -> dict[str, Any]:
        return {
            "attempted": self.attempted, "dropped": self.dropped, "fsync_failures": self.fsync_failures,
            "last_step": self.last_step, "last_error": self.last_error or "",
            "preempted_by": self.lock.status.preempted_by or self._notices.given(),
        }  # fmt: skip
