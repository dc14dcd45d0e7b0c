"""Around a model's forward: open a recording where one is wanted, hand it over when the forward has ended."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from loopscope.capture.adapter import Adapter, Recording
from loopscope.trace import ACTIVE_TRACE_SINK, TraceMeta

Ended = Callable[[Mapping[str, Any], Any], None]
Deliver = Callable[[Recording, tuple[Any, ...], Mapping[str, Any], Any], None]


class ForwardObserver:
    """Listens to the forwards of one model that `wanted` names, and to those of an armed sink (a probe).

    Args:
        adapter: knows the model.
        wanted: asked before each forward; True where it is to be recorded.
        deliver: gets the recording when its forward has ended well, before backward.
        ended: called after every forward that ended well, traced or not.
        failed: called after every forward that raised.
        broken: gets what kept a wanted forward from being recorded; it may raise it again.

    A forward that runs inside another one, or within backward (activation recompute of the whole model), is part of
    the one that it belongs to: nobody hears of it.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        wanted: Callable[[], bool],
        deliver: Deliver,
        ended: Ended,
        failed: Callable[[], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self._adapter, self._wanted, self._deliver = adapter, wanted, deliver
        self._ended, self._failed, self._broken = ended, failed, broken
        self._depth = 0
        self._counts = False
        self._open: tuple[AbstractContextManager[Recording], Recording] | None = None
        self._for_sink = False
        self.last_meta: TraceMeta | None = None
        """Of the last forward that an armed sink recorded."""
        self._remove: Callable[[], None] | None = adapter.install(self._before, self._after)

    def remove(self) -> None:
        """Take every hook away. A second call does nothing."""
        self._close()
        if self._remove is not None:
            self._remove()
            self._remove = None

    def _before(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._counts = not self._adapter.in_backward()
        if not self._counts:
            return
        armed = ACTIVE_TRACE_SINK.armed
        self._for_sink = armed and not getattr(self._adapter, "has_contract", False)  # else it records itself
        if self._for_sink or (not armed and self._wanted()):
            try:
                context = self._adapter.listening()
                self._open = (context, context.__enter__())
            except Exception as error:
                if self._for_sink:
                    raise
                self._broken(error)

    def _after(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, failed: bool) -> None:
        self._depth -= 1
        if self._depth or not self._counts:
            return
        recording = self._close()
        try:
            if failed:
                self._failed()
                return
            if recording is not None:
                recording.given(args, kwargs)
            if recording is not None and self._for_sink:
                self.last_meta = recording.meta()
                for point in recording.points():
                    ACTIVE_TRACE_SINK.record(point)
                return
            if recording is not None:
                self._deliver(recording, args, kwargs, output)
            self._ended(kwargs, output)
        finally:
            if recording is not None:
                recording.clear()

    def _close(self) -> Recording | None:
        if self._open is None:
            return None
        (context, recording), self._open = self._open, None
        context.__exit__(None, None, None)
        return recording
