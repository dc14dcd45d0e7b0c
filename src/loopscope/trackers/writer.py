"""The trackers beside the training: a writer that looks at the rows on their way to the store."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from loopscope.alerts import AlertNotice
from loopscope.catalog.tables.keys import RUN_KEY_NAMES
from loopscope.collect import RowWriter
from loopscope.trackers.assembly import StepAssembler
from loopscope.trackers.guard import Event, GuardedTracker, Tell
from loopscope.trackers.protocol import StepValues

_log = logging.getLogger("loopscope.trackers")


class TrackerObserver:
    """Looks at the rows of a run, and hands the values of each whole step to the trackers.

    Nothing of it gets out under "record", and no row changes but `timing`, which also counts the seconds that the
    trackers took since the last one (`with_own_time`, before the row is written).

    Args:
        start: starts the trackers; is given what writes a health row about them.
        write: writes a health row.
        dropped: rows that could not be written so far.
        keys: run-level columns of a health row before the first row came. Rows of another `aggregation_scope` than
            theirs do not count.
        attempt: number of the attempt.
        on_error: "record" or "raise".
    """

    def __init__(
        self,
        start: Callable[[Tell], Sequence[GuardedTracker]],
        *,
        write: Callable[[Mapping[str, object]], None],
        dropped: Callable[[], int],
        keys: Mapping[str, object],
        attempt: int = 1,
        on_error: Literal["record", "raise"] = "record",
    ) -> None:
        self.errors = 0
        """Failures outside the trackers themselves; the rows were written nevertheless."""
        self._write, self._dropped, self._on_error = write, dropped, on_error
        self._keys, self._scope = dict(keys), str(keys["aggregation_scope"])
        self._assembler = StepAssembler(scope=self._scope, attempt=attempt)
        self._seconds = 0.0
        self._closed = False
        self.trackers = tuple(start(self._tell))
        """In the order of their names in the configuration."""

    def with_own_time(self, row: Mapping[str, Any]) -> Mapping[str, object]:
        """A health row as it is to be written."""
        if row.get("event") != "timing":
            return row
        seconds, self._seconds = self._seconds, 0.0
        detail = {**json.loads(row["detail"]), "trackers": round(seconds, 6)}
        return {**row, "value": row["value"] + seconds, "detail": json.dumps(detail)}

    def observe(self, table: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Take written rows of one table; the trackers get the steps that they complete."""
        with self._guarded():
            for row in rows:
                if row.get("aggregation_scope") == self._scope:
                    self._keys = {key: row[key] for key in RUN_KEY_NAMES if key in row}
                self._send(self._assembler.see(table, row, self._dropped()))

    def alert(self, notice: AlertNotice) -> None:
        """Tell people of an alert through every tracker.

        Raises:
            Exception: what the first tracker that failed raised, after all were told.
        """
        self._each(lambda tracker: tracker.alert(notice))

    def close_trackers(self) -> None:
        """Send what is left and end the trackers. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._guarded():
                self._send(self._assembler.finish(self._dropped()))
        finally:
            self._each(lambda tracker: tracker.close())

    def _each(self, do: Callable[[GuardedTracker], None]) -> None:
        """Every tracker has its turn; then the first failure is raised."""
        raised = None
        for tracker in self.trackers:
            try:
                do(tracker)
            except Exception as error:  # noqa: BLE001  (raised below)
                raised = raised or error
        if raised is not None:
            raise raised

    def _send(self, steps: Iterable[StepValues]) -> None:
        for values in steps:
            for tracker in self.trackers:
                tracker.log(values)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.errors += 1
            if self._on_error == "raise":
                raise
            if self.errors == 1:
                _log.warning(
                    "a row could not be made ready for trackers: %s: %s", type(error).__name__, error
                )
        finally:
            self._seconds += time.perf_counter() - began

    def _tell(self, event: Event, detail: str, count: int | None = None) -> None:
        severity = "info" if event == "tracker_started" else "warn"
        self._write({**self._keys, "event": event, "severity": severity, "count": count, "detail": detail})


class TrackingWriter(TrackerObserver):
    """Hands every row on, then observes it: a row reaches the store whatever a tracker does.

    Args:
        inner: takes the rows.
        start: starts the trackers.
        about: `keys`, `attempt` and `on_error` of the observer.
    """

    def __init__(
        self, inner: RowWriter, start: Callable[[Tell], Sequence[GuardedTracker]], **about: Any
    ) -> None:
        self._inner = inner
        super().__init__(
            start, write=lambda row: inner.append("health", row), dropped=lambda: inner.dropped, **about
        )

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Hand one row on, then observe it."""
        if table == "health":
            row = self.with_own_time(row)
        self._inner.append(table, row)
        self.observe(table, (row,))

    def append_many(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """The same for several rows of one table, at once where `inner` can."""
        many = getattr(self._inner, "append_many", None)
        if many is None or table == "health":
            for row in rows:
                self.append(table, row)
            return
        many(table, rows)
        self.observe(table, rows)

    def flush(self, durable: bool = False) -> None:
        """Hand on."""
        self._inner.flush(durable=durable)

    def close(self) -> None:
        """End the trackers, and hand on."""
        try:
            # Alerts of the last rows go through the trackers, so they come first.
            settle = getattr(self._inner, "settle", None)
            if settle is not None:
                settle()
            self.close_trackers()
        finally:
            self._inner.close()

    @property
    def dropped(self) -> int:
        """Rows that could not be written so far."""
        return self._inner.dropped
