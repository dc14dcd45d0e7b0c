"""`Collector`: turns what a training step saw into rows, and lets nothing of it out or live on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, get_args

from loopscope.collect import health
from loopscope.collect.context import RowContext, RowDict, Scope
from loopscope.collect.corpus_losses import ProbeCorpus
from loopscope.collect.exchange import exchange, merged_rows
from loopscope.collect.exchange_layout import ExchangeLayout
from loopscope.collect.headline import headline
from loopscope.collect.loss import StepLoss, check_step_order, loss_row
from loopscope.collect.pending_losses import DeviceLoss, PendingLosses
from loopscope.collect.probe import reduce_probe
from loopscope.collect.probe_stream import ProbeWindow
from loopscope.collect.ranks import LocalReducer, RankReducer
from loopscope.collect.rows import StepRows, rank_rows
from loopscope.collect.run_rows import RunRows
from loopscope.collect.traced_step import TracedStep, TracedSteps
from loopscope.errors import ConfigError
from loopscope.store import RowWriter
from loopscope.trace import LossComponents, OnError, TraceMeta, TraceSink, VisitSpec

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class Collector:
    """A `LoopTraceCollector` that writes rows.

    Tables: `loss` (every step), `router`, `residual`, `transition` (traced steps), `probe_router`,
    `probe_overlap`, `probe_loss` (probe steps), `health` (when something happens, and at every traced step its
    coverage, trace bytes and loopscope's own time).

    Every callback is synchronous and keeps no tensor that was handed to it. Under ``on_error="record"`` no exception
    leaves a callback: it is counted in `errors` and written to `health` as text. Under ``"raise"`` it leaves.

    Args:
        writer: takes the rows.
        context: run, attempt, rank and world size of every row.
        expected_visits: what the model's configuration promises, at its largest R; empty where it promises nothing.
        on_error: "record" or "raise".
        corpus: identity and strata of the probe corpus; needed before the first `on_probe_step`.
        reducer: merges over ranks. Rows are then of scope "global", and only the reducer's writer writes. Every
            rank calls every callback; with the last microbatch of a traced step they exchange two buffers.
        per_rank: with a reducer, every rank also writes rank-local rows; their only lists are the counts.
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
        """What the next probe runs over."""
        self._expected = expected_visits
        self._on_error: OnError = on_error
        self._reducer = reducer or LocalReducer()
        # Without a reducer the layout of a step is that of what was seen, so that rows of unpromised visits stay.
        self._layout = None if reducer is None else ExchangeLayout.of_expected(expected_visits)
        self._per_rank = per_rank and reducer is not None
        scope: Scope = "rank_local" if reducer is None else "global"
        self._rows = RunRows(writer, context, on_error, scope=scope, writes=self._reducer.is_writer)
        isolate = on_error == "record" or self._reducer.num_ranks > 1
        self._steps = TracedSteps(isolate=isolate, mixed=reducer is None)
        self._last_loss_step: int | None = None
        self._last_traced = 0
        self._losses = PendingLosses(self._reducer)
        self._kept: Exception | None = None

    @property
    def errors(self) -> int:
        """Exceptions that were kept from the training loop so far."""
        return self._rows.errors

    @property
    def writes(self) -> bool:
        """True where this rank's rows are written."""
        return self._rows.writes

    @property
    def dropped(self) -> int:
        """Rows that could not be written, and callbacks that failed: what the run lacks."""
        return self._rows.dropped

    def begin_step(self, step: int, *, tokens_seen: int | None = None) -> None:
        """Note when `step` begins, before its callbacks, and the tokens of all ranks up to and including it; said again
        it tells its tokens, and does not begin anew."""
        self._rows.clock.begin(step, tokens_seen)

    def last_step(self) -> int:
        """The last step that has ended."""
        return self._rows.clock.last()

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
        absent: Mapping[str, str] | None = None,
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
            absent: column that does not exist here → why: a balancing loss that the objective lacks, a closure error
                where one component is made from the others.

        Returns:
            `loss/task`, `loss/total`, `moe/lb_loss`, `health/dropped`.
        """
        known = StepLoss(
            step, loss, grad_norm, lr, task_loss_sum, num_target_tokens, other_loss, absent or {}
        )
        with self._rows.guard("on_metrics_step", step):
            return self._loss(known)
        return {}

    def submit_loss(self, step: int, loss: DeviceLoss, *, wait: bool = False) -> dict[str, float]:
        """The step's loss as scalars that are still on the device: `on_metrics_step` without waiting for them.

        The row comes as soon as the values have arrived, at most 8 steps later, and at every traced step, flush
        and close; until then a dying process loses it. With a reducer the values are summed over ranks in one
        asynchronous all-reduce, so every rank calls this at every step. Do not mix it with `on_metrics_step`.

        Args:
            step: 1-based, rising.
            loss: this rank's part.
            wait: wait for the values, where the trainer has waited for the device itself.
        """
        with self._rows.guard("submit_loss", step):
            self._losses.submit(step, loss)
            return self._drain_losses(block=wait)
        return {}

    def on_trace_step(
        self,
        step: int,
        sink: TraceSink,
        meta: TraceMeta,
        *,
        valid: Bool[Tensor, "B S"] | Mapping[int, Tensor | None] | None = None,
        microbatch: int = 0,
        num_microbatches: int | None = 1,
    ) -> dict[str, float]:
        """Add one microbatch; with the last one write the step's rows. See `LoopTraceCollector.on_trace_step`.

        With `num_microbatches` None nobody knows yet how many there are, and `end_step` writes the rows. A visit
        whose reduction fails costs its own row only (its metrics are null, reason `failed`). A window that recorded
        a position twice keeps the first point, and `health` has a critical `sink_fault` row.

        Returns:
            With the last microbatch the `moe/*`, `loop/*` and `health/*` headline scalars, before it nothing.
        """
        with self._rows.guard("on_trace_step", step):
            try:
                if (before := self._steps.interrupted(step, microbatch)) is not None:
                    text = before.abandoned(f"step {step}, microbatch {microbatch} came")
                    self._rows.health(before.step, [text])
                self._steps.add(step, sink, meta, valid, microbatch, num_microbatches)
            except Exception as error:
                if self._reducer.num_ranks == 1:
                    raise
                # The others are about to exchange; this rank joins them, and only then speaks of its error.
                self._rows.failed("on_trace_step", step, error)
                self._kept = error
            if microbatch + 1 == num_microbatches:
                return self._end(step, num_microbatches)
        return {}

    def end_step(self, step: int) -> dict[str, float]:
        """Close a traced step: no further microbatch of it comes. Where its rows are written already, do nothing.

        With a reducer every rank calls it at every step that is to be traced, also where a rank saw nothing of it.
        """
        with self._rows.guard("end_step", step):
            if step > self._last_traced:
                return self._end(step, self._steps.microbatches(step))
        return {}

    def skip_trace(self, step: int, detail: str, *, failed: bool = True) -> None:
        """Give up the trace of a step, as a critical event; `end_step` still closes it.

        Args:
            step: the step.
            detail: why.
            failed: True where it could not be captured, False where the step itself did not come to its end.
        """
        traced = self._steps.take()
        self._steps.skip(step)
        if failed:
            self._rows.errors += 1
            self._rows.health(step, [health.event("capture_failed", "critical", detail=detail)])
        elif traced is not None:
            self._rows.health(step, [traced.abandoned(detail)])

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
        with self._rows.guard("on_probe_step", step):
            if not self.writes:
                return {}  # every rank ran the same corpus; it counts once
            isolate, expected = self._on_error == "record", self._expected
            found = reduce_probe(sink, meta, per_token_loss, self.corpus, expected=expected, isolate=isolate)
            self._report(step, found)
            return headline(found.tables)
        return {}

    def count_error(self) -> None:
        """Count an exception that an integration kept from the training."""
        self._rows.errors += 1

    def expect(self, visits: Iterable[VisitSpec]) -> None:
        """Promise these visits instead; with a reducer, that of its layout stands."""
        if self._layout is None:
            self._expected = tuple(visits)

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
        row = health.event(name, severity, detail=detail, unrolled_pos=unrolled_pos, value=value)
        self._rows.health(step, [row])

    def record_rows(self, step: int, tables: Mapping[str, Iterable[RowDict]]) -> None:
        """Write a deep probe's rows: table → rows without run-level keys."""
        for table, rows in tables.items():
            self._rows.write(table, step, rows)

    def flush(self, durable: bool = False) -> None:
        """Hand buffered rows over, losses under way included; to the disk where `durable` (at checkpoints)."""
        with self._rows.guard("flush", self._last_loss_step or 0):
            self._drain_losses(block=True)
        self._rows.writer.flush(durable=durable)

    def close(self) -> None:
        """Write what is left and close the writer."""
        with self._rows.guard("close", self._last_loss_step or 0):
            self._drain_losses(block=True)
        if (traced := self._steps.take()) is not None:
            self._rows.health(traced.step, [traced.abandoned("the run ended")])
        self._rows.writer.close()

    def _loss(self, known: StepLoss) -> dict[str, float]:
        check_step_order(known.step, self._last_loss_step)
        self._last_loss_step = known.step
        row, events = loss_row(known)
        self._rows.write("loss", known.step, [row])
        self._rows.health(known.step, events)
        return {**headline({"loss": [row]}), "health/dropped": float(self.dropped)}

    def _drain_losses(self, *, block: bool = False) -> dict[str, float]:
        found: dict[str, float] = {}
        for arrived in self._losses.drain(block=block):
            found = self._loss(arrived)
        return found

    def _end(self, step: int, num_microbatches: int) -> dict[str, float]:
        traced, self._last_traced = self._steps.take(), step
        if traced is None and self._reducer.num_ranks == 1:
            return {}  # told when it failed
        return self._finish(step, traced, num_microbatches)

    def _finish(self, step: int, traced: TracedStep | None, num_microbatches: int) -> dict[str, float]:
        """Merge the step over ranks and write its rows. Collective: every rank comes here once per traced step."""
        layout = self._layout
        if layout is None:
            assert traced is not None  # one rank gives a failed step up at once
            layout = traced.accumulated.layout()
        buffer = exchange(layout, traced, step, num_microbatches, self._reducer)
        if self._per_rank and traced is not None:
            for table, rows in rank_rows(traced.accumulated.finish()).items():
                self._rows.write(table, step, rows, "rank_local")
        kept, self._kept = self._kept, None
        if kept is not None and self._on_error == "raise":
            raise kept
        # Under "raise" every rank looks at the same result, so that all stop together.
        if not self.writes and self._on_error != "raise":
            return {}
        num_ranks = self._reducer.num_ranks
        found = merged_rows(layout, buffer, traced, expected=self._expected, num_ranks=num_ranks)
        self._report(step, found, traced)
        self._drain_losses(block=True)  # the transfer has just waited for everything before it
        scalars = headline(found.tables)
        if found.coverage is not None:
            scalars["health/coverage"] = found.coverage
        return {**scalars, "health/dropped": float(self.dropped)}

    def _report(self, step: int, found: StepRows, traced: TracedStep | None = None) -> None:
        """Write what a step gave and what is to be said about it; under "raise", raise its first problem."""
        began = time.perf_counter()
        for table, rows in found.tables.items():
            self._rows.write(table, step, rows)
        self._rows.errors += found.num_errors
        if traced is not None:
            traced.seconds["write"] = time.perf_counter() - began
            found.events.append(health.of_timing(traced.seconds, traced.num_microbatches))
        self._rows.health(step, found.events)
        if self._on_error == "raise" and found.problems:
            raise found.problems[0]


ParquetCollector = Collector
"""`Collector` under the name that says where its rows end: in Parquet, by way of the store's writer."""
