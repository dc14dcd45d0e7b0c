"""W&B and TensorBoard as torchtitan's own settings switch them on: one run, one folder, no second ones."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torchtitan.components.metrics import BaseLogger, TensorBoardLogger, WandBLogger

from loopscope.collect.error_text import describe
from loopscope.errors import ConfigError, LoopscopeError
from loopscope.integrations.torchtitan.options import LoopscopeOptions
from loopscope.session import LoopscopeConfig
from loopscope.trackers.guard import MAX_FAILURES

_log = logging.getLogger("loopscope.trackers")

FLAGS: Mapping[str, str] = MappingProxyType({"wandb": "enable_wandb", "tensorboard": "enable_tensorboard"})
"""Tracker → the field of torchtitan's `metrics` that switches it on."""


def tracker_names(config: Any) -> tuple[str, ...]:
    """The trackers of a ``Trainer.Config``: torchtitan's that are on, then ``loopscope.trackers``.

    Raises:
        ConfigError: ``loopscope.trackers`` names one of torchtitan's, which has a switch of its own.
    """
    names = [name for name, field in FLAGS.items() if getattr(config.metrics, field)]
    for name in getattr(config, "loopscope", LoopscopeOptions()).trackers:
        if name in FLAGS and name not in names:
            flag = "--metrics." + FLAGS[name].replace("_", "-")
            raise ConfigError(
                f"--loopscope.trackers names {name}, expected torchtitan's own switch: it starts {name} itself, and "
                f"loopscope writes into the same run. Set {flag}."
            )
        names.append(name)
    return tuple(dict.fromkeys(names))


def share_loggers(processor: Any, settings: LoopscopeConfig, failed: Callable[[str], None]) -> dict[str, Any]:
    """What torchtitan started, by tracker name; an exception where it did not.

    Under ``on_error="record"`` its own loggers get a guard: a failure is reported, and the logger dropped after some
    failures in a row, instead of ending the training.

    Args:
        processor: torchtitan's ``MetricsProcessor``.
        settings: of the run.
        failed: called with what happened where a logger fails.
    """
    loggers = getattr(processor.logger, "_loggers", [])
    found: dict[str, Any] = {}
    for place, logger in enumerate(loggers):
        if isinstance(logger, TensorBoardLogger):
            name, found["tensorboard"] = "tensorboard", logger.writer
        elif isinstance(logger, WandBLogger):
            name, found["wandb"] = "wandb", logger.wandb.run
        else:
            continue
        if settings.on_error == "record":
            loggers[place] = GuardedLogger(name, logger, failed)
    for name in settings.trackers:
        if name in FLAGS and found.get(name) is None:
            found[name] = LoopscopeError(f"torchtitan did not start {name}; its log has the reason")
    return found


class GuardedLogger(BaseLogger):
    """A logger of torchtitan's whose failures do not end the training.

    Args:
        name: the tracker's.
        inner: torchtitan's logger.
        failed: called at the first failure, and when the logger is dropped.
    """

    def __init__(self, name: str, inner: Any, failed: Callable[[str], None]) -> None:
        self.inner = inner
        self._name, self._failed = name, failed
        self._in_a_row = self._failures = 0

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Hand on, unless it was dropped."""
        if self._in_a_row >= MAX_FAILURES:
            return
        try:
            self.inner.log(metrics, step)
            self._in_a_row = 0
        except Exception as error:  # noqa: BLE001  (a tracker does not end a training)
            self._failures += 1
            self._in_a_row += 1
            if self._in_a_row >= MAX_FAILURES:
                self._report(f"torchtitan's logger is off after {self._in_a_row} failures in a row", error)
            elif self._failures == 1:
                self._report(f"torchtitan's logger lost the values of step {step}", error)

    def close(self) -> None:
        """Hand on."""
        try:
            self.inner.close()
        except Exception as error:  # noqa: BLE001  (the training has ended)
            self._report("torchtitan's logger did not close", error)

    def _report(self, what: str, error: Exception) -> None:
        detail = f"{self._name}: {what}: {describe(error)}"
        _log.warning("%s", detail)
        self._failed(detail)
