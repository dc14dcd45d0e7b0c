"""One traced optimizer step: its microbatches added, then its rows and what is to be said about them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopscope.collect import health
from loopscope.collect.accumulate import Key, StepAccumulator
from loopscope.collect.context import RowDict
from loopscope.collect.coverage import Coverage, at_depth, compare
from loopscope.collect.error_text import describe
from loopscope.collect.exchange import Local
from loopscope.collect.pairs import Pair
from loopscope.collect.rows import StepRows, describe_key, step_rows
from loopscope.errors import LoopscopeError, MetricInputError, TraceError
from loopscope.trace import TraceMeta, TraceSink, VisitSpec

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
    problems: tuple[LoopscopeError, ...] = ()
    """What "raise" is loud about: broken values, a position recorded twice, more seen than promised."""


class TracedStep:
    """Takes the microbatches of one traced step in order; holds partial sums and text, no trace tensor.

    With `isolate` a visit whose reduction raises costs its own row only; without, the exception leaves.
    """

    def __init__(
        self,
        step: int,
        meta: TraceMeta,
        expected: Iterable[VisitSpec],
        num_microbatches: int,
        *,
        isolate: bool,
    ) -> None:
        meta.check()
        self.step = step
        self.num_microbatches = num_microbatches
        self.failures = Failures()
        """Visits and pairs whose reduction raised."""
        self.seconds = {"reduce": 0.0, "finish": 0.0, "write": 0.0}
        self._meta = meta
        self._expected = at_depth(expected, meta.num_stacks)
        self._isolate = isolate
        self._accumulator = StepAccumulator()
        self._trace_bytes = 0
        self._sink_faults: list[str] = []

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
            MetricInputError: a visit breaks its contract, and `isolate` is off.
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
        self._accumulator.add(sink, valid, on_failure=self.failures.keep if self._isolate else None)

    def finish(self) -> TraceResult:
        """The rows, after the one transfer to the host."""
        began = time.perf_counter()
        seen = self._accumulator.seen()
        rows = step_rows(self._accumulator.finish())
        # A visit counts as seen where every microbatch saw it, and as unexpected where any did.
        complete = {spec for spec, times in seen.items() if times == self.num_microbatches}
        promised = set(self._expected)
        coverage = compare(self._expected, complete | (seen.keys() - promised if promised else set()))
        events = [health.of_coverage(coverage, has_promise=bool(promised))]
        events += [health.event("sink_fault", "critical", detail=text, count=1) for text in self._sink_faults]
        events += [*self.failures.events, *of_rows(rows), health.of_bytes(self._trace_bytes)]
        self.seconds["finish"] = time.perf_counter() - began
        return TraceResult(
            tables=rows.tables,
            coverage=coverage,
            events=events,
            num_errors=self.failures.count,
            problems=tuple(self._problems(rows, coverage)),
        )

    def take(self) -> Local:
        """This rank's partial vectors and counters, for the exchange between ranks."""
        entries, failed = self._accumulator.take()
        return Local(
            num_microbatches=self.num_microbatches,
            num_stacks=self._meta.num_stacks,
            entries=entries,
            failed=failed,
            sink_faults=len(self._sink_faults),
            trace_bytes=self._trace_bytes,
        )

    def _problems(self, rows: StepRows, coverage: Coverage) -> Iterator[LoopscopeError]:
        yield from broken_values(rows)
        if self._sink_faults:
            yield TraceError(f"the window is invalid: {'; '.join(self._sink_faults)}")
        if coverage.unexpected:
            yield TraceError(
                f"visits that nobody promised: {list(coverage.unexpected)}; expected only {coverage.expected} "
                "visits. Make expected_visits from the configuration of the model that is being trained."
            )


def of_rows(rows: StepRows) -> list[RowDict]:
    """Health rows about the values of a step's visits."""
    events = health.of_faults(rows.faults)
    residual = rows.tables["residual"]
    if residual and all(row.get("num_tokens") == 0 for row in residual):
        events.append(health.event("no_valid_token", "warn", detail="valid is False everywhere"))
    return events


def broken_values(rows: StepRows) -> Iterator[LoopscopeError]:
    """An error per visit whose values break the contract."""
    for position, fault in rows.faults:
        if fault.fatal:
            yield MetricInputError(f"unrolled_pos {position}: {fault.message}")


class Failures:
    """Visits and pairs whose reduction raised, as text."""

    def __init__(self) -> None:
        self.count = 0
        self.events: list[RowDict] = []

    def keep(self, key: Key, error: Exception) -> None:
        """Note one; what a `StepAccumulator` is to call."""
        self.count += 1
        position = (key.target if isinstance(key, Pair) else key).unrolled_pos
        detail = f"{describe_key(key)}: {describe(error)}"
        self.events.append(health.event("visit_failed", "critical", detail=detail, unrolled_pos=position))


def trace_bytes(sink: TraceSink) -> int:
    """Bytes of all tensors of a window: what recording it kept alive until the callback."""
    return sum(tensor.nbytes for point in sink.values() for tensor in point.tensors().values())
