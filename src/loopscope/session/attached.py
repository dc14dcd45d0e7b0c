"""An attached model: counts steps, hands traced forwards to the collector, removes its hooks at the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loopscope.capture.runtime import ForwardObserver
from loopscope.capture.visits import promised_meta
from loopscope.errors import ConfigError, TraceError
from loopscope.session.custom import CustomMetrics
from loopscope.session.losses import LossLog
from loopscope.session.ranks import decide, rank_and_world
from loopscope.session.run import Loopscope
from loopscope.trace import LossComponents, TraceMeta

if TYPE_CHECKING:
    from loopscope.capture.adapter import Adapter, Recording
    from loopscope.capture.settings import RunSettings
    from loopscope.collect import ParquetCollector
    from loopscope.session.config import LoopscopeConfig

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
    ) -> None:
        self.adapter = adapter
        self.settings = settings
        self.facts = facts
        self.step = first_step - 1
        """The optimizer step of the last training forward."""
        self.traced_steps = 0
        """Traced forwards that were handed over so far."""
        self._session = Loopscope(config)
        self._first_step = first_step
        self._meshes = meshes
        self._microbatches = settings.num_microbatches
        self._microbatch = -1
        self._by_hand = False
        self._observer: ForwardObserver | None = None
        self._losses = LossLog()
        self._lr: float | None = None
        self._custom: CustomMetrics | None = None
        self._reads_loss = True

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
                reducer=self._rank_reducer(world_size),
                configuration={"capture": self.facts},
            )
            # No checkpoint says whose it is: a resume goes on with the newest attempt, from before `first_step`.
            resumed = self._session.config.resume
            self._session.begin_attempt(
                first_step=self._first_step,
                parent_run_id=self._session.run_id if resumed else None,
                parent_attempt=self._session.last_attempt if resumed else None,
            )
            self._observer = ForwardObserver(
                self.adapter, wanted=self._wanted, deliver=self._deliver, ended=self._after_forward
            )
        except BaseException:
            self._session.close()
            raise
        _ATTACHED.add(id(model))
        return self

    def close(self) -> None:
        """Remove the hooks, write what is left. A second call does nothing."""
        observer, self._observer = self._observer, None
        if observer is None:
            return
        _ATTACHED.discard(id(self.adapter.model))
        try:
            observer.remove()
        finally:
            try:
                self._write_losses(self.step + 1)
            finally:
                self._session.close()

    def __enter__(self) -> Attachment:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    # -- for the training loop --------------------------------------------------------------------------------------

    @property
    def collector(self) -> ParquetCollector:
        """The run's collector. TraceError before `open`."""
        if self._session.collector is None:
            raise TraceError(
                "the model is not attached; expected `with loopscope.attach(...) as run:` around this."
            )
        return self._session.collector

    @property
    def run_id(self) -> str:
        """UUIDv7 of the run."""
        return self._session.run_id

    def begin_step(self, step: int, *, num_microbatches: int | None = None, lr: float | None = None) -> None:
        """Say which optimizer step the coming forwards belong to; without it they are counted.

        Args:
            step: 1-based.
            num_microbatches: forwards of this step, where it differs.
            lr: learning rate of the update.
        """
        self._by_hand = True
        self._start(step)
        self._lr = lr
        if num_microbatches is not None:
            self._microbatches = num_microbatches

    def log_loss(
        self, loss: float | LossComponents, *, grad_norm: float | None = None, lr: float | None = None
    ) -> None:
        """Write the `loss` row of the current step, for models whose output does not tell the loss.

        Args:
            loss: the objective, where it is cross-entropy alone; else all six components.
            grad_norm: norm before clipping.
            lr: learning rate of the update.
        """
        if self.step < self._first_step:
            raise ConfigError("log_loss() came before the first training forward; expected it after one.")
        if not isinstance(loss, LossComponents):
            loss = float(loss.detach() if hasattr(loss, "detach") else loss)
            loss = LossComponents(
                task_loss=loss, lb_loss=0.0, lb_loss_factor=0.0, z_loss=0.0, z_loss_factor=0.0,
                total_loss=loss,
            )  # fmt: skip
        self._reads_loss = False
        self.collector.on_metrics_step(self.step, loss, grad_norm, lr)

    def trace_meta(self) -> TraceMeta:
        """For ``run_probe_forward(model, ids, meta=run.trace_meta(), ...)``, whose forward is recorded as well.

        Of the last forward that a probe recorded, else as the plan promises.

        Raises:
            TraceError: the plan promises no number of calls, and nothing was recorded yet.
        """
        meta = None if self._observer is None else self._observer.last_meta
        meta = meta or promised_meta(self.adapter.plan)
        if meta is None:
            raise TraceError(
                "the plan promises no number of calls, so the depth of the next forward is not known. Give every "
                "block of the plan its `calls`."
            )
        return meta

    # -- around a forward ---------------------------------------------------------------------------------------------

    def _start(self, step: int) -> None:
        self.step = step
        self._microbatch = -1
        self._session.begin_step(step)

    def _wanted(self) -> bool:
        if not self.adapter.is_training():
            return False
        if not self._by_hand and (self.step < self._first_step or self._microbatch + 1 >= self._microbatches):
            self._start(self.step + 1)
        self._microbatch += 1
        return self._session.is_trace_step(self.step) and self._microbatch < self._microbatches

    def _deliver(
        self, recording: Recording, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        try:
            points = recording.points(verify=self.settings.verify)
            meta = recording.meta()
            valid = self.adapter.valid(args, kwargs)
        except Exception as error:
            # A first trace that is wrong is a wrong set-up; later, the training loop comes first.
            if self.traced_steps == 0 or self._session.config.on_error == "raise":
                raise
            detail = f"{type(error).__name__}: {error}"
            self.collector.record_event(self.step, "capture_failed", "critical", detail=detail)
            return
        self._write_losses(self.step)
        assert self._custom is not None
        self._custom.run(self.collector, self.step, points, recording.blocks())
        self.collector.on_trace_step(
            self.step,
            {point.unrolled_pos: point for point in points},
            meta,
            valid=valid,
            microbatch=self._microbatch,
            num_microbatches=self._microbatches,
        )
        self.traced_steps += 1
        points.clear()

    def _after_forward(self, kwargs: Mapping[str, Any], output: Any) -> None:
        if self._reads_loss and self.adapter.is_training():
            parts = self.adapter.losses(kwargs, output)
            if parts is not None:
                self._losses.add(self.step, parts, self._lr)

    def _write_losses(self, before: int) -> None:
        for step, components, lr in self._losses.finished(before):
            self.collector.on_metrics_step(step, components, None, lr)

    def _rank_reducer(self, world_size: int) -> Any:
        if world_size == 1:
            return None
        from loopscope.collect.ranks import GroupReducer

        if not self.adapter.expected_visits():
            raise ConfigError(
                "rows of several ranks are merged by the promised visits, and this plan promises none. Give every "
                "block of the plan its number of `calls` in one forward (at most, where it varies)."
            )
        return GroupReducer(next(iter(self.adapter.model.parameters())).device)
