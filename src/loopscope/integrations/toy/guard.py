"""A collector around another one that checks the lifetime rule after every callback."""

from torch import Tensor, nn

from loopscope.trace import (
    LoopTraceCollector,
    TraceMeta,
    TraceSink,
    TraceWatch,
    watch_trace,
)


class GuardedCollector:
    """Checks objects right after each callback, storages where nothing else owns the activations.

    In a probe nothing else does when the callback returns. In training autograd does until the backward: call
    `check_after_backward` then, with loss and outputs deleted.
    """

    def __init__(self, inner: LoopTraceCollector, model: nn.Module) -> None:
        self.visits_checked = 0
        """Visits whose tensors and storages were found released."""
        self._inner, self._model = inner, model
        self._pending: list[tuple[TraceWatch, int]] = []
        self.on_metrics_step = inner.on_metrics_step
        """As it is: there is no trace in it."""

    def on_trace_step(
        self,
        step: int,
        sink: TraceSink,
        meta: TraceMeta,
        *,
        valid: Tensor | None = None,
        microbatch: int = 0,
        num_microbatches: int = 1,
    ) -> dict[str, float]:
        """Hand on, clear the sink, and check that no trace tensor object is alive.

        Raises:
            LeakError: one is.
        """
        watch, visits = watch_trace(sink, model=self._model), len(sink)
        found = self._inner.on_trace_step(
            step, sink, meta, valid=valid, microbatch=microbatch, num_microbatches=num_microbatches
        )
        sink.clear()
        watch.assert_released(storages=False)
        self._pending.append((watch, visits))
        return found

    def on_probe_step(
        self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Tensor
    ) -> dict[str, float]:
        """Hand on, clear the sink, and check that no trace tensor and no storage is alive.

        Raises:
            LeakError: one is.
        """
        watch, visits = watch_trace(sink, model=self._model), len(sink)
        found = self._inner.on_probe_step(step, sink, meta, per_token_loss)
        sink.clear()
        watch.assert_released(storages=False)
        watch.assert_released()
        self.visits_checked += visits
        return found

    def check_after_backward(self) -> None:
        """Check that no storage of the step's traces is alive.

        Raises:
            LeakError: one is.
        """
        while self._pending:
            watch, visits = self._pending.pop()
            watch.assert_released()
            self.visits_checked += visits
