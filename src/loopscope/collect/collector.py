"""`ParquetCollector`: turns what a training step saw into rows, and lets nothing of it out or live on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, get_args

from loopscope.collect import health
from loopscope.collect.accumulate import to_host
from loopscope.collect.context import RowContext, RowDict, Scope, StepClock
from loopscope.collect.exchange import Local
from loopscope.collect.faults import describe
from loopscope.collect.global_layout import GlobalLayout
from loopscope.collect.headline import headline
from loopscope.collect.loss import LossExtras, check_step_order, loss_row
from loopscope.collect.probe import reduce_probe
from loopscope.collect.probe_stream import ProbeWindow
from loopscope.collect.ranks import RankReducer
from loopscope.collect.ring import DeviceLoss, LossRing
from loopscope.collect.rows import counts_only, step_rows
from loopscope.collect.step import TracedStep, TraceResult
from loopscope.collect.strata import ProbeCorpus
from loopscope.collect.together import finish_together
from loopscope.collect.writer import RowWriter, append_rows
from loopscope.errors import ConfigError
from loopscope.trace import LossComponents, OnError, TraceMeta, TraceSink, VisitSpec

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

_log = logging.getLogger("loopscope.collect")


class ParquetCollector:
    """A `LoopTraceCollector` that writes rows.

    Tables: `loss` (every step), `router`, `residual`, `transition` (traced steps), `probe_router`,
    `probe_overlap`, `probe_loss` (probe steps), `health` (when something happens, and at every traced step its
    coverage, trace bytes and loopscope's own time).

    Every callback is synchronous and keeps no tensor that was handed to it. Under ``on_error="record"`` no
    exception leaves a callback: it is counted in `errors`, written to `health` as text and dropped. Under
    ``"raise"`` it leaves.

    Args:
        writer: takes the rows.
        context: run, attempt, rank and world size of every row.
        expected_visits: the visits that the model's configuration promises, at its largest R; empty where
            nobody promises anything (coverage then has no ratio).
        on_error: "record" or "raise".
        corpus: identity and strata of the probe corpus; needed before the first `on_probe_step`.
        reducer: merges over ranks. Rows are then of scope "global", and only the reducer's writer writes. Every
            rank calls every callback; with the last microbatch of a traced step they exchange two buffers.
        per_rank: with a reducer, every rank also writes rank-local rows of its own, whose lists are the counts
            only. Without a reducer all rows are rank-local anyway.
    """

    def __init__(
        self,
        writer: RowWriter,
        *,
        context: RowContext,
        expected_visits: Iterable[VisitSpec],
        on_error: OnError = "record",
        corpus: ProbeCorpus | None = None,
        reducer: RankReducer | None = None,
        per_rank: bool = False,
    ) -> None:
        if on_error not in get_args(OnError):
            raise ConfigError(f"on_error is {on_error!r}, expected 'record' or 'raise'")
        expected_visits = tuple(expected_visits)
        if reducer is not None and not expected_visits:
            raise ConfigError(
                "expected_visits is empty, expected the model's visits: ranks exchange buffers that are laid out by "
                "them. Give them, or leave the reducer out and get rank-local rows."
            )
        self.corpus = corpus
        self.errors = 0
        """Exceptions that were kept from the training loop so far."""
        self._writer = writer
        self._context = context
        self._expected = expected_visits
        self._on_error: OnError = on_error
        self._reducer = reducer
        self._layout = None if reducer is None else GlobalLayout(self._expected)
        self._scope: Scope = "rank_local" if reducer is None else "global"
        self._per_rank = per_rank and reducer is not None
        self.writes = reducer is None or reducer.is_writer
        """True where this rank's probe rows are written."""
        self._clock = StepClock()
        self._open: TracedStep | None = None
        self._skipped_step: int | None = None
        self._last_loss_step: int | None = None
        self._ring = LossRing(reducer)
        self._kept: Exception | None = None

    @property
    def dropped(self) -> int:
        """Rows that could not be written, and callbacks that failed: what the run lacks."""
        return self._writer.dropped + self.errors

    def begin_step(self, step: int, *, tokens_seen: int | None = None) -> None:
        """Note when `step` begins; call it before the step's callbacks.

        Args:
            step: 1-based optimizer step.
            tokens_seen: training tokens of all ranks up to and including this step; None where unknown.
        """
        self._clock.begin(step, tokens_seen)

    def on_metrics_step(
        self,
        step: int,
        loss: LossComponents,
        grad_norm: float | None = None,
        lr: float | None = None,
        *,
        task_loss_sum: float | None = None,
        num_target_tokens: int | None = None,
        other_loss: float | None = None,
    ) -> dict[str, float]:
        """Write the step's `loss` row; see `LoopTraceCollector.on_metrics_step`.

        Args:
            step: the step the values belong to; it may lie some steps back, but never before the last call's.
            loss: the six components; with a reducer they must be global already.
            grad_norm: norm before clipping; None where it is not known.
            lr: learning rate of the update; None where it is not known.
            task_loss_sum: summed cross-entropy over the target tokens.
            num_target_tokens: tokens with a target.
            other_loss: further terms of the objective, already weighted; None where none is declared.

        Returns:
            `loss/task`, `loss/total`, `moe/lb_loss`, `health/dropped`.
        """
        extras = LossExtras(task_loss_sum, num_target_tokens, other_loss)
        return self._guarded("on_metrics_step", step, lambda: self._loss(step, loss, grad_norm, lr, extras))

    def submit_loss(self, step: int, loss: DeviceLoss, *, wait: bool = False) -> dict[str, float]:
        """The step's loss as scalars that are still on the device: `on_metrics_step` without waiting for them.

        The row comes as soon as the values have arrived, at most 8 steps later, and at every traced step, flush
        and close; until then a dying process loses it. With a reducer the values are summed over ranks in one
        asynchronous all-reduce, so every rank calls this at every step. Do not mix it with `on_metrics_step`.

        Args:
            step: 1-based, rising.
            loss: this rank's part.
            wait: wait for the values, so that the headline is this step's; for steps at which the trainer has
                waited for the device itself.

        Returns:
            The headline scalars of the newest loss that has arrived; nothing where none has.
        """

        def submit() -> dict[str, float]:
            self._ring.submit(step, loss)
            return self._drain_losses(block=wait)

        return self._guarded("submit_loss", step, submit)

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
        """Add one microbatch; with the last one write the step's rows. See
        `LoopTraceCollector.on_trace_step`.

        A visit whose reduction fails costs its own row only (its metrics are null, reason `failed`). A window
        that recorded a position twice keeps the first point, and `health` has a critical `sink_fault` row.

        Returns:
            With the last microbatch the `moe/*`, `loop/*` and `health/*` headline scalars, before it nothing.
        """
        return self._guarded(
            "on_trace_step", step, lambda: self._trace(step, sink, meta, valid, microbatch, num_microbatches)
        )

    def probe_window(self) -> ProbeWindow:
        """The window of the next probe, which reduces each visit as it happens."""
        return ProbeWindow(isolate=self._on_error == "record", keep=self.writes)

    def on_probe_step(
        self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Float[Tensor, "B S"]
    ) -> dict[str, float]:
        """Write the probe's rows; see `LoopTraceCollector.on_probe_step`.

        Returns:
            `probe/loss`, `probe/overlap_mean` (mean top-k overlap over all pairs of loop steps of a layer).
        """
        return self._guarded("on_probe_step", step, lambda: self._probe(step, sink, meta, per_token_loss))

    def record_event(
        self,
        step: int,
        name: str,
        severity: health.Severity,
        *,
        detail: str | None = None,
        unrolled_pos: int | None = None,
        value: float | None = None,
    ) -> None:
        """Write a health row on behalf of the integration."""
        self._health(
            step, [health.event(name, severity, detail=detail, unrolled_pos=unrolled_pos, value=value)]
        )

    def record_rows(self, step: int, tables: Mapping[str, Iterable[RowDict]]) -> None:
        """Write a deep probe's rows: table → rows without run-level keys."""
        for table, rows in tables.items():
            self._write(table, step, rows)

    def flush(self, durable: bool = False) -> None:
        """Hand buffered rows over, losses under way included; to the disk where `durable` (at checkpoints)."""
        self._guarded("flush", self._last_loss_step or 0, lambda: self._drain_losses(block=True))
        self._writer.flush(durable=durable)

    def close(self) -> None:
        """Write what is left and close the writer."""
        self._guarded("close", self._last_loss_step or 0, lambda: self._drain_losses(block=True))
        if self._open is not None:
            self._abandon("the run ended")
        self._writer.close()

    def _guarded(self, where: str, step: int, callback: Callable[[], dict[str, float]]) -> dict[str, float]:
        try:
            return callback()
        except Exception as error:
            if self._on_error == "raise":
                raise
            self._failed(where, step, error)
            return {}

    def _failed(self, where: str, step: int, error: Exception, unrolled_pos: int | None = None) -> None:
        """Count an exception that is kept from the training loop, and keep it as text alone."""
        self.errors += 1
        detail = f"{where}: {describe(error)}"
        if not self.writes:
            _log.warning("loopscope, rank %d, step %d: %s", self._context.rank, step, detail)
        self._health(
            step,
            [health.event("error", "critical", detail=detail, unrolled_pos=unrolled_pos, count=self.errors)],
        )

    def _loss(
        self,
        step: int,
        loss: LossComponents,
        grad_norm: float | None,
        lr: float | None,
        extras: LossExtras,
    ) -> dict[str, float]:
        check_step_order(step, self._last_loss_step)
        self._last_loss_step = step
        row, events = loss_row(loss, grad_norm, lr, extras)
        self._write("loss", step, [row])
        self._health(step, events)
        return {**headline({"loss": [row]}), "health/dropped": float(self.dropped)}

    def _drain_losses(self, *, block: bool = False) -> dict[str, float]:
        found: dict[str, float] = {}
        for arrived in self._ring.drain(block=block):
            found = self._loss(arrived.step, arrived.loss, arrived.grad_norm, arrived.lr, arrived.extras)
        return found

    def _trace(
        self,
        step: int,
        sink: TraceSink,
        meta: TraceMeta,
        valid: Tensor | None,
        microbatch: int,
        num_microbatches: int,
    ) -> dict[str, float]:
        last = microbatch + 1 == num_microbatches
        try:
            if step != self._skipped_step or microbatch == 0:
                self._add(step, sink, meta, valid, microbatch, num_microbatches)
        except Exception as error:
            self._open, self._skipped_step = None, step
            if self._reducer is None:
                raise
            # The others are about to exchange; this rank joins them, and only then speaks of its error.
            self._failed("on_trace_step", step, error)
            self._kept = error
        if not last:
            return {}
        traced, self._open = self._open, None
        if self._reducer is not None:
            return self._finish_together(step, traced, num_microbatches)
        return {} if traced is None else self._report(step, traced.finish(), traced, num_microbatches)

    def _add(
        self,
        step: int,
        sink: TraceSink,
        meta: TraceMeta,
        valid: Tensor | None,
        microbatch: int,
        num_microbatches: int,
    ) -> None:
        began = time.perf_counter()
        if self._open is not None and (self._open.step != step or microbatch == 0):
            self._abandon(f"step {step}, microbatch {microbatch} came")
        if self._open is None:
            isolate = self._on_error == "record" or self._reducer is not None
            self._open = TracedStep(step, meta, self._expected, num_microbatches, isolate=isolate)
        self._open.add(sink, meta, valid, microbatch, num_microbatches)
        self._open.seconds["reduce"] += time.perf_counter() - began

    def _finish_together(
        self, step: int, traced: TracedStep | None, num_microbatches: int
    ) -> dict[str, float]:
        assert self._reducer is not None
        assert self._layout is not None
        # Under "raise" every rank looks at the same result, so that all of them stop together.
        wanted = self._reducer.is_writer or self._on_error == "raise"
        kept, self._kept = self._kept, None
        local = Local(num_microbatches=num_microbatches, whole_step_failed=True)
        if traced is not None:
            local = traced.take()
        result = finish_together(traced, local, self._layout, self._reducer, want_result=wanted)
        if self._per_rank:
            for table, rows in step_rows(to_host(local.entries, local.failed)).tables.items():
                if table == "router":
                    rows = [counts_only(row) for row in rows]
                self._write(table, step, rows, "rank_local")
        if kept is not None and self._on_error == "raise":
            raise kept
        return {} if result is None else self._report(step, result, traced, num_microbatches)

    def _report(
        self, step: int, result: TraceResult, traced: TracedStep | None, num_microbatches: int
    ) -> dict[str, float]:
        began = time.perf_counter()
        for table, rows in result.tables.items():
            self._write(table, step, rows)
        self.errors += result.num_errors
        events = list(result.events)
        if traced is not None:
            traced.seconds["write"] = time.perf_counter() - began
            events.append(health.of_timing(traced.seconds, num_microbatches))
        self._health(step, events)
        if self._on_error == "raise" and result.problems:
            raise result.problems[0]
        self._drain_losses(block=True)  # the transfer has just waited for everything before it
        found = headline(result.tables)
        if result.coverage.ratio is not None:
            found["health/coverage"] = result.coverage.ratio
        return {**found, "health/dropped": float(self.dropped)}

    def _probe(self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Tensor) -> dict[str, float]:
        if not self.writes:
            return {}  # every rank ran the same corpus; it counts once
        isolate = self._on_error == "record"
        promised = self._expected
        result = reduce_probe(sink, meta, per_token_loss, self.corpus, expected=promised, isolate=isolate)
        for table, rows in result.tables.items():
            self._write(table, step, rows)
        self.errors += result.num_errors
        self._health(step, result.events)
        if not isolate and result.problems:
            raise result.problems[0]
        return headline(result.tables)

    def _abandon(self, why: str) -> None:
        """Give up a traced step whose last microbatch never came; its rows would be partial."""
        traced, self._open = self._open, None
        assert traced is not None
        detail = (
            f"{traced.microbatches} of {traced.num_microbatches} microbatches of the step were traced, then "
            f"{why}; no rows were written for it"
        )
        self._health(traced.step, [health.event("trace_incomplete", "critical", detail=detail)])

    def _write(self, table: str, step: int, rows: Iterable[RowDict], scope: Scope | None = None) -> None:
        if scope is None:
            if not self.writes:
                return
            scope = self._scope
        keys = {**self._context.keys(scope), "step": step, **self._clock.columns(step)}
        if whole := [{**keys, **row} for row in rows]:
            append_rows(self._writer, table, whole)

    def _health(self, step: int, events: Iterable[RowDict]) -> None:
        # Even a writer that raises must not reach the training loop through the report of an error.
        try:
            self._write("health", step, events)
        except Exception:
            if self._on_error == "raise":
                raise
            self.errors += 1
