"""The protocol between a trainer and whatever turns traces into rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from loopscope.trace.point import LossComponents, TraceMeta
from loopscope.trace.sink import TraceSink

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@runtime_checkable
class LoopTraceCollector(Protocol):
    """Turns what a training step saw into numbers. Every method is synchronous and keeps no trace tensor.

    Each method returns flat headline scalars for the trainer's own log.
    """

    def on_metrics_step(
        self, step: int, loss: LossComponents, grad_norm: float | None = None, lr: float | None = None
    ) -> dict[str, float]:
        """One call per optimizer step, in step order; it may come some steps late, naming its own step.

        `grad_norm` and `lr` are None where they are not known, never guessed.
        """
        ...

    def on_trace_step(
        self,
        step: int,
        sink: TraceSink,
        meta: TraceMeta,
        *,
        valid: Bool[Tensor, "B S"] | None = None,
        microbatch: int = 0,
        num_microbatches: int = 1,
    ) -> dict[str, float]:
        """After each microbatch's forward of a traced step; rows come with the last microbatch.

        `valid` is True for non-padding **input** tokens (never ``labels != ignore_index``: prompt tokens are
        routed too); None means that every token counts.
        """
        ...

    def on_probe_step(
        self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Float[Tensor, "B S"]
    ) -> dict[str, float]:
        """A forward over the fixed corpus. `per_token_loss` [B, S] is in nats; its last position is 0."""
        ...


class NullCollector:
    """Does nothing and satisfies `LoopTraceCollector`."""

    def on_metrics_step(
        self, step: int, loss: LossComponents, grad_norm: float | None = None, lr: float | None = None
    ) -> dict[str, float]:
        """Ignore the step."""
        return {}

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
        """Ignore the trace."""
        return {}

    def on_probe_step(
        self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Tensor
    ) -> dict[str, float]:
        """Ignore the probe."""
        return {}
