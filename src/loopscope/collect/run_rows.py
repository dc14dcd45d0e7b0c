"""Rows with the run's keys on their way to the writer; errors as text that go the same way."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from loopscope.collect import health
from loopscope.collect.context import RowContext, RowDict, Scope, StepClock
from loopscope.collect.error_text import describe
from loopscope.store import RowWriter
from loopscope.trace import OnError

_log = logging.getLogger("loopscope.collect")


class RunRows:
    """Puts the keys of run, attempt, rank and step before a row, and hands it to the writer.

    Args:
        writer: takes the rows.
        context: run, attempt, rank and world size.
        on_error: "record" keeps exceptions from the training loop and counts them, "raise" lets them out.
        scope: of rows that say none of their own.
        writes: False on a rank whose merged rows another one writes.
    """

    def __init__(
        self, writer: RowWriter, context: RowContext, on_error: OnError, *, scope: Scope, writes: bool
    ) -> None:
        self.errors = 0
        """Exceptions that were kept from the training loop so far."""
        self.writer, self.writes = writer, writes
        self.clock = StepClock()
        """When each step began."""
        self._context, self._scope, self._on_error = context, scope, on_error

    @property
    def dropped(self) -> int:
        """Rows that could not be written, and callbacks that failed: what the run lacks."""
        return self.writer.dropped + self.errors

    def write(self, table: str, step: int, rows: Iterable[RowDict], scope: Scope | None = None) -> None:
        """Write rows of one table and step; of a `scope` of their own whether or not this rank `writes`."""
        if scope is None:
            if not self.writes:
                return
            scope = self._scope
        keys = {**self._context.keys(scope), "step": step, **self.clock.columns(step)}
        if whole := [{**keys, **row} for row in rows]:
            self.writer.append_many(table, whole)

    def health(self, step: int, events: Iterable[RowDict]) -> None:
        """Write health rows; even a writer that raises does not reach the training loop through them."""
        try:
            self.write("health", step, events)
        except Exception:
            if self._on_error == "raise":
                raise
            self.errors += 1

    @contextmanager
    def guard(self, where: str, step: int) -> Iterator[None]:
        """Under "record", keep what is raised inside from the training loop."""
        try:
            yield
        except Exception as error:
            if self._on_error == "raise":
                raise
            self.failed(where, step, error)

    def failed(self, where: str, step: int, error: Exception) -> None:
        """Count an exception that is kept from the training loop, and keep it as text alone."""
        self.errors += 1
        detail = f"{where}: {describe(error)}"
        if not self.writes:
            _log.warning("loopscope, rank %d, step %d: %s", self._context.rank, step, detail)
        self.health(step, [health.event("error", "critical", detail=detail, count=self.errors)])
