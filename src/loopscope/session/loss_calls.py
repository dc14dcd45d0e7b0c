"""What a training loop says of its losses to an attached model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from loopscope.errors import ConfigError, LoopscopeError, TraceError
from loopscope.session.losses import LossLog, as_components
from loopscope.trace import LossComponents

if TYPE_CHECKING:
    from loopscope.capture.adapter import Adapter
    from loopscope.collect import Collector
    from loopscope.session.run import Loopscope
    from loopscope.session.step_count import StepCount

_log = logging.getLogger("loopscope.session")


class LossCalls:
    """The part of an `Attachment` that is about losses. Under `on_error` "record" nothing of it raises while training
    runs, whatever it is given: it is a critical event."""

    adapter: Adapter
    _session: Loopscope
    _count: StepCount
    _raises: bool
    _lr: float | None

    def __init__(self) -> None:
        self._losses = LossLog()
        self._was_opened = False

    @property
    def collector(self) -> Collector:
        """The run's collector. TraceError before `open` and after `close`."""
        if self._session.collector is None:
            raise TraceError(
                "the model is not attached; expected `with loopscope.attach(...) as run:` around this."
            )
        return self._session.collector

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
        with self._kept("log_step"):
            if not isinstance(step, int):
                raise ConfigError(f"step is {step!r}, expected an integer: `run.step` is the current one.")
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
        with self._kept("log_loss"):
            if self._was_opened and not self._count.has_begun:
                raise ConfigError("no training forward was seen yet; expected one before the first loss.")
            components, absent = as_components(loss)
            self._losses.stop_reading()
            self.collector.on_metrics_step(self._count.step, components, grad_norm, lr, absent=absent)

    def _read_loss(self, kwargs: Mapping[str, Any], output: Any) -> None:
        with self._kept("the model's output tells no loss any more"):
            self._losses.read(self.adapter, self._count.step, self._lr, kwargs, output)

    def _write_losses(self, ahead: int = 0, together: bool = True) -> None:
        with self._kept("losses are missing"):
            self._losses.write(self.collector, self._count.step + ahead, together=together)

    @contextmanager
    def _kept(self, what: str, event: str = "loss_unread") -> Iterator[None]:
        """Makes a critical event of what goes wrong, unless errors are to be raised or nothing was opened yet."""
        try:
            yield
        except Exception as error:  # a loss of another kind, an output nobody foresaw, a rank that is gone
            if self._raises or not self._was_opened:
                raise
            name = "" if isinstance(error, LoopscopeError) else f"{type(error).__name__}: "
            detail = f"{what}: {name}{error}"
            if (collector := self._session.collector) is not None:
                collector.record_event(max(self._count.step, 0), event, "critical", detail=detail)
            _log.warning("%s", detail)
