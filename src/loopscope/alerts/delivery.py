"""Deliveries beside the training: a thread per receiver, a bounded wait, failures as text."""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loopscope.alerts.gather import merged
from loopscope.alerts.notice import AlertNotice, NoticeSink
from loopscope.errors import LoopscopeError

CLOSE_S = 5.0
"""Seconds that the end of a run waits for deliveries."""
_GRACE_S = 1.0
_ADDRESS = re.compile(r"\w+://\S+")
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """A notice that did not arrive."""

    receiver: str
    notice: AlertNotice
    reason: str
    """For people; no address, no secret."""


class Notifier:
    """Hands notices to receivers, and never makes the caller wait.

    What waits for a receiver is at most one notice per rule and severity: a later one is merged into it. After a
    delivery, notices of the same rule and severity are gathered for `gather_s` seconds.
    """

    def __init__(
        self, sinks: Mapping[str, NoticeSink], *, timeout_s: float = 10.0, gather_s: float = 600.0
    ) -> None:
        self._failures: list[Failure] = []
        self._timeout_s, self._gather_s = timeout_s, gather_s
        self._lines: dict[str, _Line] = {}
        self._pid = os.getpid()
        self.add(sinks)

    def add(self, sinks: Mapping[str, NoticeSink]) -> None:
        """More receivers, from now on; one of a name that is there takes its place."""
        for name, sink in sinks.items():
            self._lines[name] = _Line(
                name,
                sink,
                timeout_s=self._timeout_s,
                gather_s=self._gather_s,
                on_failure=self._failures.append,
            )

    def send(self, notice: AlertNotice, *, skip_failed: bool = False) -> None:
        """Hand a notice to every receiver; with `skip_failed`, to those alone whose last delivery arrived."""
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads
        for line in self._lines.values():
            if not (skip_failed and line.failed):
                line.put(notice)

    def failures(self) -> list[Failure]:
        """What did not arrive since the last call."""
        count = len(self._failures)
        if not count:
            return []
        found = self._failures[:count]
        del self._failures[:count]
        return found

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Deliver what waits, for so long in all; what did not arrive by then is a failure."""
        if os.getpid() != self._pid:
            return
        end = time.monotonic() + timeout_s
        for line in self._lines.values():
            line.finish()
        for line in self._lines.values():
            line.wait(end)


class _Line:
    """One receiver's thread, and what waits for it."""

    def __init__(
        self,
        name: str,
        sink: NoticeSink,
        *,
        timeout_s: float,
        gather_s: float,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self.failed = False
        """The last delivery did not arrive."""
        self._name, self._sink = name, sink
        self._timeout_s, self._gather_s = timeout_s, gather_s
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, str], AlertNotice] = {}
        self._told: dict[tuple[str, str], float] = {}
        self._under_way: AlertNotice | None = None
        self._ending = self._given_up = False
        self._thread: threading.Thread | None = None
        self._hanging: threading.Thread | None = None

    def put(self, notice: AlertNotice) -> None:
        key = (notice.rule, notice.severity)
        with self._changed:
            if self._ending:
                return
            earlier = self._waiting.get(key)
            self._waiting[key] = notice if earlier is None else merged(earlier, notice)
            if self._thread is None:
                self._thread = _daemon(self._run, f"loopscope-alerts-{self._name}")
            self._changed.notify()

    def finish(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()

    def wait(self, end: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            self._given_up = True
            left = [*([self._under_way] if self._under_way else []), *self._waiting.values()]
            self._waiting.clear()
        if left:
            self._cancel()
        for notice in left:
            self._fail(notice, "the run ended before the delivery did")

    def _run(self) -> None:
        while (notice := self._next()) is not None:
            reason = self._deliver(notice)
            with self._changed:
                self._under_way = None
                if self._given_up:
                    return  # it was counted as lost already
            self.failed = reason is not None
            if reason is not None:
                self._fail(notice, reason)

    def _next(self) -> AlertNotice | None:
        with self._changed:
            while not self._given_up:
                now = time.monotonic()
                due = {key: self._told.get(key, -self._gather_s) + self._gather_s for key in self._waiting}
                for key, at in due.items():
                    if self._ending or at <= now:
                        self._told[key] = now
                        self._under_way = self._waiting.pop(key)
                        return self._under_way
                if self._ending:
                    return None
                self._changed.wait(min(due.values()) - now if due else None)
            return None

    def _deliver(self, notice: AlertNotice) -> str | None:
        """Why it did not arrive; None where it did."""
        if self._hanging is not None and self._hanging.is_alive():
            return "an earlier delivery still hangs"
        outcome: list[str | None] = []

        def attempt() -> None:
            try:
                self._sink(notice)
            except BaseException as error:  # noqa: BLE001 - whatever a receiver does, training goes on
                outcome.append(_reason(error))
            else:
                outcome.append(None)

        # In a thread of its own: not everything that hangs can be told to stop.
        worker = _daemon(attempt, f"loopscope-alert-{self._name}")
        worker.join(self._timeout_s + _GRACE_S)
        if outcome:
            return outcome[0]
        self._hanging = worker
        self._cancel()
        return f"did not end within {self._timeout_s:g} s"

    def _cancel(self) -> None:
        cancel = getattr(self._sink, "cancel", None)
        if cancel is not None:
            cancel()

    def _fail(self, notice: AlertNotice, reason: str) -> None:
        self._on_failure(Failure(self._name, notice, reason))


def _daemon(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def _reason(error: BaseException) -> str:
    text = str(error) if isinstance(error, LoopscopeError) else f"{type(error).__name__}: {error}"
    # An address in a library's message may hold a key.
    return _ADDRESS.sub("***", text)[:_LONGEST]
