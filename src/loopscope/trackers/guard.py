"""Between a tracker and the training: whatever the tracker does, rows and losses are those without it."""

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Literal

from loopscope.alerts import AlertNotice
from loopscope.collect.error_text import describe
from loopscope.trackers.assembly import CORE_KEYS
from loopscope.trackers.budget import KeyBudget
from loopscope.trackers.protocol import StepValues, Tracker

_log = logging.getLogger("loopscope.trackers")

MAX_FAILURES = 3
"""Failures in a row after which a tracker is switched off."""
Event = Literal["tracker_started", "tracker_failed", "tracker_keys"]


Tell = Callable[[Event, str, int | None], None]
"""Writes a health row about a tracker: event, detail (which begins with the tracker's name), count."""


class GuardedTracker:
    """One tracker, its key budget and its failures.

    Under ``on_error="record"`` nothing that the tracker raises gets out of `start`, `log` and `close`: the first
    failure is told (`tracker_failed`), the third in a row switches the tracker off and is told, a failed start
    switches it off at once. Under ``"raise"`` it gets out.

    Args:
        name: the tracker's.
        start: starts it.
        limit: keys it may have in all.
        on_error: "record" or "raise".
        tell: takes what happens to it.
        close_seconds: how long `close`, at the end of training, waits for it.
        busy_seconds: how long `log` waits for an alert that it is telling; three such steps in a row, and it is off.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Tracker],
        *,
        limit: int,
        on_error: Literal["record", "raise"],
        tell: Tell,
        close_seconds: float = 30.0,
        busy_seconds: float = 1.0,
    ) -> None:
        self.name = name
        self.is_on = False
        """False before the start and after it was switched off."""
        self.missed = 0
        """Steps whose values it did not take."""
        self._start, self._limit, self._on_error, self._tell = start, limit, on_error, tell
        self._close_seconds, self._busy_seconds = close_seconds, busy_seconds
        self._tracker: Tracker | None = None
        self._budget = KeyBudget(limit)
        self._in_a_row = self._failures = self._told_keys = 0
        self._lock = threading.RLock()  # an alert is delivered from another thread

    def start(self) -> None:
        """Start it; a failure switches it off."""
        try:
            self._tracker = self._start()
            self._budget = KeyBudget(self._limit, (*CORE_KEYS, *self._tracker.own_keys))
        except Exception as error:
            if self._on_error == "raise":
                raise
            self._say("tracker_failed", f"did not start, and is off: {describe(error)}")
            return
        self.is_on = True
        self._say("tracker_started", self._tracker.where)

    def log(self, values: StepValues) -> None:
        """Hand it the values of one step, as far as its budget admits their keys."""
        if not self.is_on or self._tracker is None:
            self.missed += 1
            return
        values = dataclasses.replace(values, scalars=self._budget.admit(values.scalars))
        if self._budget.refused and not self._told_keys:
            self._tell_keys()
        try:
            self._hand_over(self._tracker, values)
            self._in_a_row = 0
        except Exception as error:
            self.missed += 1
            if self._on_error == "raise":
                raise
            self._failed(error)

    def alert(self, notice: AlertNotice) -> None:
        """Tell people of an alert through it; does nothing where it is off.

        Raises:
            Exception: whatever the tracker raises; deliveries have a guard of their own.
        """
        if self.is_on and self._tracker is not None:
            with self._lock:
                self._tracker.alert(notice)

    def close(self) -> None:
        """Let it hand over what is left; it has `close_seconds` for it."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        was_on, self.is_on = self.is_on, False
        if self._told_keys and len(self._budget.refused) > self._told_keys:
            self._tell_keys()
        raised: list[Exception] = []

        def finish() -> None:
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001  (told below)
                raised.append(error)

        # A thread of its own: a tracker that waits for a network that is gone does not keep the job from ending.
        thread = threading.Thread(target=finish, name=f"loopscope-{self.name}", daemon=True)
        thread.start()
        thread.join(self._close_seconds)
        if raised and self._on_error == "raise":
            raise raised[0]
        if not was_on:
            return  # it was told when it was switched off
        if raised:
            self._say("tracker_failed", f"at the end: {describe(raised[0])}")
        elif thread.is_alive():
            self._say(
                "tracker_failed", f"did not end within {self._close_seconds:g} s, and is left to itself"
            )

    def _hand_over(self, tracker: Tracker, values: StepValues) -> None:
        # An alert on its way to a service that does not answer must not hold the training up.
        if not self._lock.acquire(timeout=self._busy_seconds):
            raise TimeoutError(f"has been busy with an alert for more than {self._busy_seconds:g} s")
        try:
            tracker.log(values)
        finally:
            self._lock.release()

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_FAILURES:
            self.is_on = False
            self._say(
                "tracker_failed",
                f"is off after {self._in_a_row} failures in a row: {describe(error)}",
                count=self._failures,
            )
        elif self._failures == 1:
            self._say("tracker_failed", f"lost the values of a step: {describe(error)}", count=1)

    def _tell_keys(self) -> None:
        refused = self._budget.refused
        self._told_keys = len(refused)
        names = ", ".join(refused[:5]) + (", ..." if len(refused) > 5 else "")
        self._say(
            "tracker_keys",
            f"takes {self._limit} keys at most; refused so far: {names}",
            count=len(refused),
        )

    def _say(self, event: Event, text: str, count: int | None = None) -> None:
        _log.log(logging.INFO if event == "tracker_started" else logging.WARNING, "%s: %s", self.name, text)
        self._tell(event, f"{self.name}: {text}", count)
