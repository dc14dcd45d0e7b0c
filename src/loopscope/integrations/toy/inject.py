"""A collector that leaks on purpose, one kind at a time: proof that the leak check sees each of them."""

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

from loopscope.trace import LoopTraceCollector, TraceMeta, TracePoint, TraceSink

LeakKind = Literal[
    "tensor", "view", "detach", "data", "numpy", "untyped-storage", "closure", "graph", "exception"
]

LEAK_KINDS: tuple[str, ...] = get_args(LeakKind)


class LeakingCollector:
    """Does what `inner` does, and keeps something of the deepest traced visit's router logits."""

    def __init__(self, inner: LoopTraceCollector, kind: LeakKind) -> None:
        self._inner, self._retain = inner, _RETAIN[kind]
        self._kept: list[object] = []
        self.on_metrics_step, self.on_probe_step = inner.on_metrics_step, inner.on_probe_step

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
        """Hand on, then leak."""
        found = self._inner.on_trace_step(
            step, sink, meta, valid=valid, microbatch=microbatch, num_microbatches=num_microbatches
        )
        self._kept.append(self._retain(sink[max(sink)]))
        return found


def _logits(point: TracePoint) -> Tensor:
    assert point.router_logits is not None
    return point.router_logits


def _closure(point: TracePoint) -> Callable[[], int]:
    logits = _logits(point)
    return lambda: logits.shape[-1]


def _exception(point: TracePoint) -> Exception:
    try:
        raise ValueError(f"a metric failed at unrolled_pos {point.unrolled_pos}")
    except ValueError as error:
        return error  # with its traceback, whose frames hold the point


_RETAIN: dict[LeakKind, Callable[[TracePoint], object]] = {
    "tensor": _logits,
    "view": lambda point: _logits(point).view(-1),
    "detach": lambda point: _logits(point).detach(),
    "data": lambda point: _logits(point).data,
    "numpy": lambda point: _logits(point).numpy(),
    "untyped-storage": lambda point: _logits(point).untyped_storage(),
    "closure": _closure,
    "graph": lambda point: _logits(point).requires_grad_().exp(),
    "exception": _exception,
}
