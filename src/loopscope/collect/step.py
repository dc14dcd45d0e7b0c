"""One traced optimizer step: its microbatches added, then its rows and what is to be said about them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopscope.collect import health
from loopscope.collect.accumulate import Key, OnFailure, StepAccumulator
from loopscope.collect.context import RowDict
from loopscope.collect.coverage import Coverage, at_depth, compare
from loopscope.collect.faults import describe
from loopscope.collect.pairs import Pair
from loopscope.collect.rows import StepRows, describe_key, step_rows
from loopscope.errors import TraceError
from loopscope.metrics import raise_fatal
from loopscope.trace import OnError, TraceMeta, TraceSink, VisitSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResult:
    """What one traced step gives."""

    tables: dict[str, list[RowDict]]
    """Table → rows without run-level keys."""
    coverage: Coverage
    events: list[RowDict]
    """Health rows without run-level keys."""
    num_errors: int
    """Exceptions that were kept from the training loop."""
    rows: StepRows
    sink_faults: tuple[str, ...] = ()

    def raise_if_wrong(self, on_error: OnError) -> None:
        """Under "raise": the loud form of what the health rows say.

        Raises:
            MetricInputError: the values of a visit break its contract.
            TraceError: a position was recorded twice, or more was seen than promised.
        """
        if on_error != "raise":
            return
        for position, fault in self.rows.faults:
            raise_fatal([fault], f"unrolled_pos {position}")
        if self.sink_faults:
            raise TraceError(f"the window is invalid: {'; '.join(self.sink_faults)}")
        if self.coverage.unexpected:
            raise TraceError(
                f"visits that nobody promised: {list(self.coverage.unexpected)}; expected only "
                f"{self.coverage.expected} visits. Make expected_visits from the configuration of the model "
                "that is being trained."
            )


class TracedStep:
    """Takes the microbatches of one traced step in order; holds partial sums and text, no trace tensor."""

    def __init__(
        self,
        step: int,
        meta: TraceMeta,
        expected: Iterable[VisitSpec],
        num_microbatches: int,
        *,
        on_error: OnError,
    ) -> None:
        meta.check()
        self.step = step
        self.num_microbatches = num_microbatches
        self.seconds = {"reduce": 0.0, "finish": 0.0, "write": 0.0}
        self._meta = meta
        self._expected = at_depth(expected, meta.num_stacks)
        self._on_error: OnError = on_error
        self._accumulator = StepAccumulator()
        self._trace_bytes = 0
        self._sink_faults: list[str] = []
        self._failures = Failures()

    @property
    def microbatches(self) -> int:
        """Microbatches added so far."""
        return self._accumulator.microbatches

    def add(
        self, sink: TraceSink, meta: TraceMeta, valid: Tensor | None, microbatch: int, num_microbatches: int
    ) -> None:
        """Add the next microbatch.

        Raises:
            TraceError: it is not the next one, or the step's depth changed.
            MetricInputError: under "raise", where a visit breaks its contract.
        """
        if (microbatch, num_microbatches) != (self.microbatches, self.num_microbatches):
            raise TraceError(
                f"step {self.step}: got microbatch {microbatch} of {num_microbatches}, expected "
                f"{self.microbatches} of {self.num_microbatches}. Call on_trace_step once per microbatch, in "
                "order, with the same num_microbatches."
            )
        if meta != self._meta:
            raise TraceError(
                f"step {self.step}: TraceMeta changed from {self._meta} to {meta} between microbatches, "
                "expected one depth per optimizer step. Sample the number of loop steps once per step."
            )
        self._trace_bytes += trace_bytes(sink)
        self._sink_faults += getattr(sink, "faults", ())
        self._accumulator.add(sink, valid, on_failure=self._failures.handler(self._on_error))

    def finish(self) -> TraceResult:
        """The rows, after the one transfer to the host."""
        began = time.perf_counter()
        seen = self._accumulator.seen()
        parts = self._accumulator.finish()
        rows = step_rows(parts)
        # A visit counts as seen where every microbatch saw it, and as unexpected where any did.
        complete = {spec for spec, times in seen.items() if times == self.num_microbatches}
        promised = set(self._expected)
        coverage = compare(self._expected, complete | (seen.keys() - promised if promised else set()))
        events = [health.of_coverage(coverage, has_promise=bool(promised))]
        events += [health.event("sink_fault", "critical", detail=text, count=1) for text in self._sink_faults]
        events += self._failures.events
        events += health.of_faults(rows.faults)
        if rows.tables["residual"] and all(row.get("num_tokens") == 0 for row in rows.tables["residual"]):
            events.append(health.event("no_valid_token", "warn", detail="valid is False everywhere"))
        events.append(health.event("trace_bytes", "info", value=float(self._trace_bytes)))
        self.seconds["finish"] = time.perf_counter() - began
        return TraceResult(
            tables=rows.tables,
            coverage=coverage,
            events=events,
            num_errors=self._failures.count,
            rows=rows,
            sink_faults=tuple(self._sink_faults),
        )


class Failures:
    """Visits and pairs whose reduction raised, as text."""

    def __init__(self) -> None:
        self.count = 0
        self.events: list[RowDict] = []

    def handler(self, on_error: OnError) -> OnFailure | None:
        """What an accumulator is to call; None under "raise", where the exception leaves."""
        return None if on_error == "raise" else self._keep

    def _keep(self, key: Key, error: Exception) -> None:
        self.count += 1
        position = (key.target if isinstance(key, Pair) else key).unrolled_pos
        detail = f"{describe_key(key)}: {describe(error)}"
        self.events.append(health.event("visit_failed", "critical", detail=detail, unrolled_pos=position))


def trace_bytes(sink: TraceSink) -> int:
    """Bytes of all tensors of a window: what recording it kept alive until the callback."""
    return sum(tensor.nbytes for point in sink.values() for tensor in point.tensors().values())
