"""When: the microbatches of one traced step in order, steps that are given up, and steps that failed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from loopscope.collect import health
from loopscope.collect.accumulate import StepAccumulator
from loopscope.collect.context import RowDict
from loopscope.errors import TraceError
from loopscope.trace import TraceMeta, TraceSink, VisitSpec

if TYPE_CHECKING:
    from torch import Tensor


class TracedStep:
    """Takes the microbatches of one traced step in order; holds partial sums and text, no trace tensor.

    With `isolate` a visit whose reduction raises costs its own row only; without, the exception leaves. With `mixed`
    microbatches may differ in their loop steps.
    """

    def __init__(
        self, step: int, meta: TraceMeta, num_microbatches: int | None, *, isolate: bool, mixed: bool
    ) -> None:
        meta.check()
        self.step = step
        self.meta = meta
        """Of the microbatch of most loop steps."""
        self._mixed = mixed
        self._depths: Counter[int] = Counter()
        self._promised = num_microbatches
        self.accumulated = StepAccumulator(isolate=isolate)
        self.seconds = {"reduce": 0.0, "finish": 0.0, "write": 0.0}
        """Loopscope's own time in the step."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step: as promised, else those that came."""
        return self.accumulated.microbatches if self._promised is None else self._promised

    def add(
        self,
        sink: TraceSink,
        meta: TraceMeta,
        valid: Tensor | Mapping[int, Tensor | None] | None,
        microbatch: int,
        num_microbatches: int | None,
    ) -> None:
        """Add the next microbatch.

        Raises:
            TraceError: it is not the next one, or the model changed; without `mixed`, also where the depth did.
            MetricInputError: a visit breaks its contract, and `isolate` is off.
        """
        began = time.perf_counter()
        if (microbatch, num_microbatches) != (self.accumulated.microbatches, self._promised):
            raise TraceError(
                f"step {self.step}: got microbatch {microbatch} of {num_microbatches}, expected "
                f"{self.accumulated.microbatches} of {self._promised}. Call on_trace_step once per "
                "microbatch, in order, with the same num_microbatches."
            )
        if meta != (replace(self.meta, num_stacks=meta.num_stacks) if self._mixed else self.meta):
            raise TraceError(
                f"step {self.step}: TraceMeta changed from {self.meta} to {meta} between microbatches, expected "
                f"{'one model' if self._mixed else 'one depth per optimizer step, where ranks merge their rows'}. "
                "Sample the number of loop steps once per step."
            )
        self.accumulated.add(sink, valid, mixed=True)
        self._depths[meta.num_stacks] += 1
        self.meta = max(self.meta, meta, key=lambda each: each.num_stacks)
        self.seconds["reduce"] += time.perf_counter() - began

    def due(self, visit: VisitSpec) -> int:
        """Microbatches that went deep enough for a promised visit."""
        deep = (
            count for depth, count in self._depths.items() if visit.block != "loop" or visit.loop_step < depth
        )
        return sum(deep)

    def abandoned(self, why: str) -> RowDict:
        """The health row of a step whose last microbatch never came; its rows would be partial."""
        detail = (
            f"{self.accumulated.microbatches} of {self._promised or 'an open number of'} microbatches of the step were "
            f"traced, then {why}; no rows were written for it"
        )
        return health.event("trace_incomplete", "critical", detail=detail)


class TracedSteps:
    """Which traced step is open. A step of which a microbatch failed is skipped to its end.

    Args:
        isolate: of every `TracedStep`.
        mixed: likewise.
    """

    def __init__(self, *, isolate: bool, mixed: bool) -> None:
        self._isolate, self._mixed = isolate, mixed
        self._open: TracedStep | None = None
        self._skipped: int | None = None

    def interrupted(self, step: int, microbatch: int) -> TracedStep | None:
        """Give up the open step where another one begins."""
        if self._open is not None and (self._open.step != step or microbatch == 0):
            return self.take()
        return None

    def add(
        self,
        step: int,
        sink: TraceSink,
        meta: TraceMeta,
        valid: Tensor | Mapping[int, Tensor | None] | None,
        microbatch: int,
        num_microbatches: int | None,
    ) -> None:
        """Add a microbatch to its step, which begins with its first one.

        Raises:
            TraceError, MetricInputError: what `TracedStep.add` raises; the step is then skipped to its end.
        """
        if step == self._skipped and microbatch > 0:
            return
        try:
            if self._open is None:
                self._open = TracedStep(
                    step, meta, num_microbatches, isolate=self._isolate, mixed=self._mixed
                )
            self._open.add(sink, meta, valid, microbatch, num_microbatches)
        except Exception:
            self.skip(step)
            raise

    def microbatches(self, step: int) -> int:
        """Microbatches that the open step has, where it is `step`."""
        return 0 if self._open is None or self._open.step != step else self._open.num_microbatches

    def skip(self, step: int) -> None:
        """Give a step up: what it has and what still comes of it."""
        self._open, self._skipped = None, step

    def take(self) -> TracedStep | None:
        """The open step, which is over with that; None where there is none, or it failed."""
        traced, self._open = self._open, None
        return traced
