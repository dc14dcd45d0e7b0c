"""A window that hands every visit on as it happens, so that no trace is kept for a whole forward."""

from __future__ import annotations

from collections.abc import Callable

from loopscope.trace.point import TracePoint
from loopscope.trace.sink import TraceWindow, describe_point


class StreamingWindow(TraceWindow):
    """Gives each recorded visit to `consume` at once and stays empty itself.

    `consume` runs inside the model's forward: it must call no collective, and it may keep nothing of the
    point. What it raises is kept until the forward is over (`error`); later visits are then dropped.

    Args:
        consume: reduces one visit.
        next_forward: called before each forward of the probe, which runs the next documents of the corpus.
    """

    __slots__ = ("_consume", "_described", "_next_forward", "error", "visits", "width")

    def __init__(
        self, consume: Callable[[TracePoint], None], next_forward: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.visits = 0
        """Visits taken so far, in all forwards."""
        self.error: Exception | None = None
        """What `consume` raised first, without its traceback, whose frames would keep the trace alive."""
        self.width: int | None = None
        """d of the visits; None before the first."""
        self._consume = consume
        self._next_forward = next_forward
        self._described: dict[int, str] = {}

    def begin_forward(self) -> None:
        """Say that the next documents of the corpus follow: their visits are no repeats."""
        self._described.clear()
        self._next_forward()

    def take(self, point: TracePoint) -> None:
        """Hand one visit on. A position that this forward recorded before is dropped, and is a fault."""
        now = describe_point(point)
        first = self._described.get(point.unrolled_pos)
        if first is not None:
            fault = f"unrolled_pos {point.unrolled_pos} recorded by {first} and again by {now}"
            if fault not in self.faults:
                self.faults.append(fault)
            return
        self._described[point.unrolled_pos] = now
        self.visits += 1
        self.width = point.residual.shape[-1]
        if self.error is None:
            try:
                self._consume(point)
            except Exception as error:  # noqa: BLE001 - raised after the forward and its collectives
                self.error = error.with_traceback(None)
                self.error.__context__ = self.error.__cause__ = None
