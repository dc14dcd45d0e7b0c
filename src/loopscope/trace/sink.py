"""The sink: one module-level window per process that a model's eager outer loop records into; its windows."""

from collections.abc import Callable
from typing import Literal

from loopscope.errors import TraceError
from loopscope.trace.point import TracePoint

TraceSink = dict[int, TracePoint]
"""What a closed window hands over: `unrolled_pos` → TracePoint."""

OnError = Literal["record", "raise"]


def describe_point(point: TracePoint) -> str:
    """Where a visit is and what it routes over, in words."""
    # Text only: a report that held the point would keep its tensors alive.
    shape = "dense" if point.topk_idx is None else f"E={point.num_experts}, k={point.top_k}"
    return f"{point.block}[loop_step={point.loop_step}, layer_idx={point.layer_idx}] ({shape})"


class TraceWindow(dict[int, TracePoint]):
    """The dict of one window, with what went wrong in it."""

    __slots__ = ("faults",)

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        """One line per visit that was recorded more than once, naming both points; text, no tensor."""

    def take(self, point: TracePoint) -> None:
        """Keep a visit; the first point of a position stays, a second one is noted in `faults`."""
        first = self.setdefault(point.unrolled_pos, point)
        if first is not point:
            self.faults.append(
                f"unrolled_pos {point.unrolled_pos} recorded by {describe_point(first)} and again by "
                f"{describe_point(point)}"
            )


class ActiveTraceSink:
    """Collects TracePoints between `arm()` and `disarm()`.

    It is one object per process (`ACTIVE_TRACE_SINK`) because FSDP2 rebuilds containers that are passed as
    keyword arguments at every sharded block: writes into a dict that was handed down are lost silently.

    The window is open for the forward only. It closes before backward, so that activation recompute never
    records. `record()` never raises: it runs inside a model's forward, where an exception on one rank would
    hang the others. A fault is kept as text and reported by `disarm()`.
    """

    __slots__ = ("_window",)

    def __init__(self) -> None:
        self._window: TraceWindow | None = None

    @property
    def armed(self) -> bool:
        """True between `arm()` and `disarm()`."""
        return self._window is not None

    def arm(self, window: TraceWindow | None = None) -> TraceWindow:
        """Open a window and return its dict.

        Args:
            window: the window to open; None makes a new one.

        Raises:
            TraceError: a window is already open.
        """
        if self._window is not None:
            raise TraceError(
                f"the trace sink is already armed and holds {len(self._window)} visit(s); expected it "
                "disarmed. Call ACTIVE_TRACE_SINK.disarm() in a `finally` before arming it again; a probe "
                "must not run inside a traced training forward."
            )
        self._window = TraceWindow() if window is None else window
        return self._window

    def record(self, point: TracePoint) -> None:
        """Add a visit to the open window; without one, drop it. Never raises.

        The first point of a position is kept; a second one is noted in the window's `faults`.
        """
        if self._window is not None:
            self._window.take(point)

    def disarm(self, *, on_error: OnError = "record") -> TraceWindow | None:
        """Close the window and hand its dict back; None where none was open.

        Args:
            on_error: "record" keeps the first point of a position that was recorded twice and leaves the
                fault in the window's `faults` for the collector to count; "raise" raises it.

        Raises:
            TraceError: under "raise", where a position was recorded twice. The window is closed and emptied.
        """
        window, self._window = self._window, None
        if window is not None and window.faults and on_error == "raise":
            window.clear()
            raise TraceError(
                "a visit was recorded more than once in one window: "
                + "; ".join(window.faults)
                + ". Expected one record per unrolled_pos and microbatch. Count depth with "
                "unrolled_position(), and arm the sink once per forward, closing it before backward so that "
                "recompute cannot record."
            )
        return window


ACTIVE_TRACE_SINK = ActiveTraceSink()
"""The one sink of this process."""


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
