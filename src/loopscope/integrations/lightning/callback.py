"""The callback: attaches when training starts, says where each step begins and ends, closes at the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from loopscope.errors import ConfigError
from loopscope.session.attach import attach
from loopscope.session.attached import Attachment

_log = logging.getLogger("loopscope.integrations")
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""One project under two names; a trainer of one takes no callback of the other."""

Part = str | Callable[[Any], Any] | None


class LightningSteps:
    """What the callback does, whichever of Lightning's packages it is for.

    A step is what Lightning accumulates into one update: the batches up to the one in which an optimizer steps first.
    Forwards in validation, sanity checks and tests never count. Rows: `router`, `residual`, `transition` and `health`
    at traced steps; `loss` every step, whose total is what backward ran on.

    Args:
        out: folder of the run.
        part: the module that is observed: its name in the LightningModule, or a function of the LightningModule. None:
            the one model of transformers in it, else the LightningModule itself where its `forward` is used.
        options: as `loopscope.attach`.
    """

    def __init__(self, out: str | Path, part: Part = None, **options: Any) -> None:
        super().__init__()
        self._out, self._part, self._options = out, part, options
        self.run: Attachment | None = None
        """The attachment while training runs."""
        self._made = False
        self._steps: int | None = None
        """Steps that have ended, where this callback has counted them or a checkpoint says so."""
        self._losses: list[Any] = []
        self._lr: float | None = None
        self._updates = False

    def state_dict(self) -> dict[str, Any]:
        """What Lightning keeps in a checkpoint: how many steps have ended."""
        return {} if self._steps is None else {"steps": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `state_dict`."""
        self._steps = state_dict.get("steps", self._steps)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach; what is wrong with the plan, the model or the folder of a first training is raised here."""
        self._end(trained=True)
        if self._steps is None:
            self._steps = int(trainer.global_step)
        options = {"first_step": self._steps + 1, **self._options}
        try:
            self.run = attach(
                observed(pl_module, self._part),
                out=self._out,
                **{**options, **({"resume": True} if self._made else {})},
            ).open()
        except Exception as error:
            if not self._made or options.get("on_error") == "raise":
                raise
            _log.error("training goes on without loopscope: %s: %s", type(error).__name__, error)
        self._made = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Name the step that begins, unless the batch is a further one of it."""
        if self.run is not None and not self._losses:
            assert self._steps is not None
            self.run.begin_step(self._steps + 1)
            self._updates = False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The step's last batch: an optimizer is about to step, or a scaler to skip it."""
        if not self._updates:
            self._updates, self._lr = True, _rate(optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step behind the batch in which an optimizer stepped."""
        if self.run is None:
            return
        self._losses.append(_loss(outputs))
        if not self._updates:
            return
        step, losses = self.run.step, self._losses
        self._losses, self._updates = [], False
        if trainer.world_size == 1:
            # Lightning has divided each by the number of batches that it accumulates.
            total = None if any(loss is None for loss in losses) else sum(losses)
            self.run.log_step(step, loss=total, lr=self._lr)
        self._steps = step
        self.run.end_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hooks and write what is left."""
        self._end(trained=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, where training raised; Lightning tells an interrupt by hand in this way, too."""
        self._end(trained=False)

    def _end(self, *, trained: bool) -> None:
        run, self.run = self.run, None
        losses, self._losses = self._losses, []
        if run is None:
            return
        if losses:
            run.drop_step("training ended within it")
        run.close(expects_trace=trained, together=trained)


def loopscope_callback(out: str | Path, every: int = 10, *, part: Part = None, **options: Any) -> Any:
    """A callback for Lightning's `Trainer`, of the package that is imported.

    Args:
        out: folder of the run.
        every: trace every N steps.
        part: see `LightningSteps`.
        options: as `loopscope.attach`; `plan` where the model is none of transformers.

    Raises:
        ConfigError: Lightning is not installed.
    """
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            base: Any = import_module(name).Callback
        except ImportError:
            continue
        kind: Any = type("LoopscopeCallback", (LightningSteps, base), {"__module__": __name__})
        return kind(out, part, every=every, **options)
    raise ConfigError("Lightning is not installed; expected `pip install lightning`, or pytorch-lightning.")


def observed(module: Any, part: Part) -> Any:
    """The module that is attached.

    Raises:
        ConfigError: there is no module of this name.
    """
    if callable(part):
        return part(module)
    if part is not None:
        try:
            return module.get_submodule(part)
        except AttributeError as error:
            raise ConfigError(
                f"part is {part!r}, expected the name of a module in {type(module).__name__}: {error}"
            ) from None
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    models = [name for name, each in module.named_modules() if isinstance(each, kind)]
    outer = [name for name in models if not any(name.startswith(f"{other}.") for other in models)]
    return module.get_submodule(outer[0]) if len(outer) == 1 else module


def _loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _rate(optimizer: Any) -> float | None:
    """The rate of the update where every parameter group has the same."""
    rates = {float(group["lr"]) for group in optimizer.param_groups if "lr" in group}
    return rates.pop() if len(rates) == 1 else None
