"""The trackers beside the training: they get the values of each whole step, from the rows that were written."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from loopscope.alerts import AlertNotice
from loopscope.catalog.tables.keys import RUN_KEY_NAMES
from loopscope.trackers.assembly import StepAssembler
from loopscope.trackers.guard import Event, GuardedTracker, Tell
from loopscope.trackers.protocol import StepValues

_log = logging.getLogger("loopscope.trackers")


class TrackerObserver:
    """Looks at the rows of a run, and hands the values of each whole step to the trackers.

    Nothing of it gets out under "record".

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
        self._closed = False
        self.trackers = tuple(start(self._tell))
        """In the order of their names in the configuration."""

    def see(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
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

    def close(self) -> None:
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

    def _tell(self, event: Event, detail: str, count: int | None = None) -> None:
        severity = "info" if event == "tracker_started" else "warn"
        self._write({**self._keys, "event": event, "severity": severity, "count": count, "detail": detail})
