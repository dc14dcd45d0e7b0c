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
from loopscope.session.loss_calls import LossCalls
from loopscope.session.optimizers import on_step
from loopscope.session.ranks import decide, loss_merge, rank_and_world, rank_reducer
from loopscope.session.run import Loopscope
from loopscope.session.step_count import StepCount
from loopscope.session.unseen import Unseen
from loopscope.trace import TraceMeta

if TYPE_CHECKING:
    from loopscope.capture.adapter import Adapter, Recording
    from loopscope.capture.settings import RunSettings
    from loopscope.session.config import LoopscopeConfig

_log = logging.getLogger("loopscope.session")

_ATTACHED: set[int] = set()


class Attachment(LossCalls):
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
        super().__init__()
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
        self._was_opened = True
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
            step: 1-based; behind the last one that was begun.
            num_microbatches: forwards of this step; None: as many as come until it ends.
            lr: learning rate of the update.
            tokens_seen: training tokens of all ranks up to and including this step.
        """
        with self._kept("begin_step", event="no_trace"):
            self._lr, self._tokens_seen = lr, tokens_seen
            try:
                self._count.begin(step, num_microbatches)
            except ConfigError:
                self._count.by_hand()  # nobody knows whose the coming forwards are: they have no rows
                raise

    def end_step(self, *, tokens_seen: int | None = None) -> None:
        """Say that no further forward of the current step comes: its optimizer has stepped, or skipped.

        `tokens_seen` as in `begin_step`, where they are known only now.
        """
        with self._kept("end_step"):
            if tokens_seen is not None:
                self.collector.begin_step(self.step, tokens_seen=tokens_seen)
            self._count.end()

    def drop_step(self, why: str) -> None:
        """Say that the current step did not come to its end: it has no rows, and where it was traced an event."""
        with self._kept("drop_step"):
            self._losses.drop(self.step)
            self.collector.skip_trace(self.step, why, failed=False)
            self._count.drop()

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
