"""An attached model: counts steps, hands traced forwards to the collector, removes its hooks at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loopscope.capture.runtime import ForwardObserver
from loopscope.errors import ConfigError, TraceError
from loopscope.session.custom import CustomMetrics
from loopscope.session.losses import LossLog, as_components
from loopscope.session.optimizers import on_step
from loopscope.session.ranks import decide, loss_merge, rank_and_world, rank_reducer
from loopscope.session.run import Loopscope
from loopscope.session.step_count import StepCount
from loopscope.session.unseen import Unseen
from loopscope.trace import LossComponents, TraceMeta

if TYPE_CHECKING:
    from loopscope.capture.adapter import Adapter, Recording
    from loopscope.capture.settings import RunSettings
    from loopscope.collect import Collector
    from loopscope.session.config import LoopscopeConfig

_log = logging.getLogger("loopscope.session")

_ATTACHED: set[int] = set()


class Attachment:
    """What `loopscope.attach` gives: a context manager around the training loop.

    Hooks are there between `open` and `close` (``with`` calls both), and are removed also when training raises.
    """

    def __init__(
        self,
        adapter: Adapter,
        config: LoopscopeConfig,
        settings: RunSettings,
        *,
        first_step: int,
        facts: Mapping[str, Any],
        meshes: Mapping[str, Any],
        optimizers: tuple[Any, ...] = (),
    ) -> None:
        self.adapter = adapter
        self.settings = settings
        self.facts = facts
        self.traced_steps = 0
        """Traced forwards that were handed over so far."""
        self._session = Loopscope(config)
        self._raises = config.on_error == "raise"
        self._first_step = first_step
        self._meshes = meshes
        self._optimizers = optimizers
        counted = not optimizers or "num_microbatches" in settings.fields_set
        self._count = StepCount(
            first_step,
            settings.num_microbatches if counted else None,
            started=self._step_began,
            ended=self._step_ended,
        )
        self._tokens_seen: int | None = None
        self._counts = self._traces = False
        """Whether the forward that runs is one of training, of a step; whether the current step is to be traced."""
        self._unseen = Unseen()
        self._observer: ForwardObserver | None = None
        self._forget_optimizers: Callable[[], None]
        self._losses = LossLog()
        self._lr: float | None = None
        self._custom: CustomMetrics | None = None
        self._expects_trace = True

    # -- life -----------------------------------------------------------------------------------------------------

    def open(self) -> Attachment:
        """Create the run and install the hooks.

        Raises:
            TraceError: the model is attached already.
            RunExistsError: `out` holds a run.
        """
        model = self.adapter.model
        if id(model) in _ATTACHED:
            raise TraceError(
                "this model is attached already; expected one attachment at a time. Leave the first `with` block "
                "(or call close()) before attaching again."
            )
        self._custom = CustomMetrics(self.adapter, self._meshes)
        rank, world_size = rank_and_world()
        try:
            self._session.open(
                expected_visits=self.adapter.expected_visits(),
                rank=rank,
                world_size=world_size,
                decide=decide,
                reducer=rank_reducer(self.adapter, world_size),
                configuration={"capture": self.facts},
            )
            # No checkpoint says whose it is: a resume goes on with the newest attempt, from before `first_step`.
            resumed = self._session.config.resume
            self._session.begin_attempt(
                first_step=self._first_step,
                parent_run_id=self._session.run_id if resumed else None,
                parent_attempt=self._session.last_attempt if resumed else None,
            )
            self._losses.merge = loss_merge(self.adapter, world_size)
            self._observer = ForwardObserver(
                self.adapter,
                wanted=self._wanted,
                deliver=self._deliver,
                ended=self._after_forward,
                failed=self._forget_forward,
                broken=self._capture_failed,
            )
            self._forget_optimizers = on_step(self._optimizers, self._count.updated)
        except BaseException:
            if self._observer is not None:
                self._observer.remove()
            self._session.close()
            raise
        _ATTACHED.add(id(model))
        return self

    def close(self, *, expects_trace: bool = True, together: bool = True) -> None:
        """Remove the hooks, write what is left. A second call does nothing.

        Args:
            expects_trace: False where nothing traced is no fault: training failed, or had no step left.
            together: False where other ranks may not come here: nothing waits for them, unmerged rows are left out.
        """
        observer, self._observer = self._observer, None
        if observer is None:
            return
        _ATTACHED.discard(id(self.adapter.model))
        with ExitStack() as stack:
            stack.callback(self._session.close)
            stack.callback(self._write_losses, 1, together)
            observer.remove()
            self._forget_optimizers()
            self._expects_trace = expects_trace
            if not self._count.has_begun and expects_trace:
                self._nothing_came(self._first_step)
            self._count.end() if together or rank_and_world()[1] == 1 else self._count.drop()

    def __enter__(self) -> Attachment:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close(expects_trace=kind is None, together=kind is None)

    # -- for the training loop --------------------------------------------------------------------------------------

    @property
    def collector(self) -> Collector:
        """The run's collector. TraceError before `open`."""
        if self._session.collector is None:
            raise TraceError(
                "the model is not attached; expected `with loopscope.attach(...) as run:` around this."
            )
        return self._session.collector

    @property
    def step(self) -> int:
        """The optimizer step of the last training forward; one less than the first before it."""
        return self._count.step

    @property
    def run_id(self) -> str:
        """UUIDv7 of the run."""
        return self._session.run_id

    def begin_step(
        self,
        step: int,
        *,
        num_microbatches: int | None = None,
        lr: float | None = None,
        tokens_seen: int | None = None,
    ) -> None:
        """Say which optimizer step the coming forwards belong to; without it they are counted.

        The step before ends with that, if `end_step` did not end it.

        Args:
            step: 1-based.
            num_microbatches: forwards of this step; None: as many as come until it ends.
            lr: learning rate of the update.
            tokens_seen: training tokens of all ranks up to and including this step.
        """
        self._count.end()
        self._lr, self._tokens_seen = lr, tokens_seen
        self._count.begin(step, num_microbatches)

    def end_step(self, *, tokens_seen: int | None = None) -> None:
        """Say that no further forward of the current step comes: its optimizer has stepped, or skipped.

        `tokens_seen` as in `begin_step`, where they are known only now.
        """
        if tokens_seen is not None:
            self.collector.begin_step(self.step, tokens_seen=tokens_seen)
        self._count.end()

    def drop_step(self, why: str) -> None:
        """Say that the current step did not come to its end: it has no rows, and where it was traced an event."""
        self._losses.drop(self.step)
        self.collector.skip_trace(self.step, why, failed=False)
        self._count.drop()

    def log_step(
        self,
        step: int,
        *,
        loss: Any = None,
        grad_norm: Any = None,
        lr: float | None = None,
        objective: str | None = None,
    ) -> None:
        """Say what the trainer itself knows of a step whose loss is read from the model's output.

        Args:
            step: the step, whose `loss` row is not written yet: the current one, or the one before it.
            loss: what backward ran on, over all microbatches and ranks; a number, or a scalar on its device. With it
                the closure of the row is a check: it is compared with what the model's output says.
            grad_norm: norm before clipping; as `loss`.
            lr: learning rate of the update.
            objective: why the objective is not what the model's output says, where it is not: its factors and the
                closure are then null with this reason.
        """
        self._losses.told(step, total=loss, grad_norm=grad_norm, lr=lr, objective=objective)

    def log_loss(
        self, loss: float | LossComponents, *, grad_norm: float | None = None, lr: float | None = None
    ) -> None:
        """Write the `loss` row of the current step, for models whose output does not tell the loss.

        Args:
            loss: the objective of all ranks, where it is cross-entropy alone; else all six components.
            grad_norm: norm before clipping.
            lr: learning rate of the update.
        """
        if not self._count.has_begun:
            raise ConfigError("log_loss() came before the first training forward; expected it after one.")
        components, absent = as_components(loss)
        self._losses.stop_reading()
        self.collector.on_metrics_step(self.step, components, grad_norm, lr, absent=absent)

    def trace_meta(self) -> TraceMeta:
        """For ``run_probe_forward(model, ids, meta=run.trace_meta(), ...)``, whose forward is recorded as well.

        Of the last forward that a probe recorded, else as the plan promises.

        Raises:
            TraceError: the plan promises no number of calls, and nothing was recorded yet.
        """
        meta = None if self._observer is None else self._observer.last_meta
        meta = meta or self.adapter.promised_meta()
        if meta is None:
            raise TraceError(
                "the plan promises no number of calls, so the depth of the next forward is not known. Give every "
                "block of the plan its `calls`."
            )
        return meta

    # -- around a forward ---------------------------------------------------------------------------------------------

    def _wanted(self) -> bool:
        self._counts = self.adapter.is_training()
        if not self._counts:
            self._unseen.ignore(self.adapter.ignored())
            return False
        self._counts = self._count.forward()
        if not self._counts:
            self._unseen.ignore("outside begin_step() and end_step(), or beyond num_microbatches")
            return False
        return self._traces

    def _forget_forward(self) -> None:
        if self._counts:
            self._count.failed()

    def _deliver(
        self, recording: Recording, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        try:
            points = recording.points(verify=self.settings.verify)
            meta = recording.meta()
            self._unseen.tell_remarks(self.collector, self.step, recording, raises=self._raises)
            self.collector.expect(self.adapter.expected_visits())
            valid = self.adapter.valid(args, kwargs, points, recording.blocks())
            if not self._losses.is_merged:
                self._write_losses()
            assert self._custom is not None
            self._custom.run(self.collector, self.step, points, recording.blocks())
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a trace must not end the training
            self._capture_failed(error)
        else:
            self.collector.on_trace_step(
                self.step,
                {point.unrolled_pos: point for point in points},
                meta,
                valid=valid,
                microbatch=self._count.microbatch,
                num_microbatches=self._count.num_microbatches,
            )
            points.clear()
        self.traced_steps += 1

    def _capture_failed(self, error: Exception) -> None:
        """A trace that is wrong has no rows; from here on nothing ends the training but "raise"."""
        if self._raises:
            raise error
        detail = f"{type(error).__name__}: {error}"
        self.collector.skip_trace(self.step, detail)
        _log.warning("step %d was not traced: %s", self.step, detail)

    def _step_began(self, step: int) -> None:
        self.collector.begin_step(step, tokens_seen=self._tokens_seen)
        self._tokens_seen, self._traces = None, self._session.is_trace_step(step)

    def _step_ended(self, step: int, saw_forward: bool) -> None:
        """Where the step was to be traced, its rows are written."""
        if self._traces:
            if not saw_forward and self._expects_trace:
                self._nothing_came(step)
            self.collector.end_step(step)
            if self._losses.is_merged:
                self._write_losses()

    def _nothing_came(self, step: int) -> None:
        self._unseen.tell(self.collector, step, raises=self._raises)

    def _after_forward(self, kwargs: Mapping[str, Any], output: Any) -> None:
        if self._counts:
            self._read_loss(kwargs, output)
            self._count.done()

    def _read_loss(self, kwargs: Mapping[str, Any], output: Any) -> None:
        with self._losses.guarded(self.collector, self.step, raises=self._raises):
            self._losses.read(self.adapter, self.step, self._lr, kwargs, output)

    def _write_losses(self, ahead: int = 0, together: bool = True) -> None:
        with self._losses.guarded(self.collector, self.step, raises=self._raises):
            self._losses.write(self.collector, self.step + ahead, together=together)
