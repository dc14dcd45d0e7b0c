"""The callback: attaches at the start of training, says where each step begins and ends, closes at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from loopscope.integrations.transformers.tap import TrainerTap, trainer_of
from loopscope.session.attach import attach
from loopscope.session.attached import Attachment

_log = logging.getLogger("loopscope.integrations")


class LoopscopeCallback(TrainerCallback):
    """Attaches to the trainer's model while it trains.

    Steps are the trainer's own optimizer steps, from `on_step_begin` to `on_step_end`; every forward of training
    between the two is a microbatch, however many there are. Evaluation never counts. Rows: `router`, `residual`,
    `transition` and `health` at traced steps; `loss` every step, written at the next traced step: its total is the
    loss that the trainer ran backward on, its parts are read from the model's output.

    A trainer that begins again in the same process (`auto_find_batch_size`, a second ``train()``) goes on in the same
    run as a new attempt. What goes wrong then is logged, and training runs on without loopscope, unless `on_error` is
    "raise".

    Args:
        out: folder of the run.
        options: as `loopscope.attach`.
    """

    def __init__(self, out: str | Path, **options: Any) -> None:
        self._out, self._options = out, options
        self.run: Attachment | None = None
        """The attachment while training runs."""
        self._made = False
        self._begun: int | None = None
        """The step that has begun and not ended."""
        self._tap: TrainerTap | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach; what is wrong with the plan, the model or the folder of a first training is raised here."""
        self.close()
        options: dict[str, Any] = {
            "first_step": state.global_step + 1,
            "backend": "transformers",
            **self._options,
        }
        model = kwargs["model"]
        # The trainer may wrap the model for several ranks; hooks belong on what it wraps.
        if type(model).__name__ == "DistributedDataParallel":
            model = model.module
        if not self._made:
            self.run = attach(model, out=self._out, **options).open()
        else:
            self.run = self._go_on(model, options)
        self._made = True
        trainer = None if self.run is None else trainer_of(self)
        self._tap = None if trainer is None else TrainerTap(trainer)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Name the step that begins, and its learning rate."""
        step = state.global_step + 1
        # A group that the end of an epoch left open goes on in the next one, and begins a second time.
        if self.run is not None and step != self._begun:
            self.run.begin_step(step, lr=_rate(kwargs))
            self._begun = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the step: its optimizer has stepped, or a scaler has skipped it."""
        if self.run is None or self._begun is None:
            return
        step, self._begun = self._begun, None
        if self._tap is not None and args.world_size == 1:
            loss, norm = self._tap.take()
            self.run.log_step(step, loss=loss, grad_norm=norm, objective=self._tap.objective)
        self.run.end_step(tokens_seen=_tokens(args, state))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the gradient norm of the last step, which the trainer tells with its own loss."""
        norm = (kwargs.get("logs") or {}).get("grad_norm")
        if self.run is not None and norm is not None and self.run.step == state.global_step:
            self.run.log_step(state.global_step, grad_norm=norm)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks and write what is left."""
        self._close(together=True)

    def close(self) -> None:
        """Remove the hooks and write what is left; a second call does nothing.

        transformers tells a callback nothing when training raises: where the trainer outlives that, use the callback
        in a `with` statement around ``trainer.train()``.
        """
        self._close(together=False)  # other ranks may not come here

    def _close(self, *, together: bool) -> None:
        run, self.run = self.run, None
        tap, self._tap = self._tap, None
        begun, self._begun = self._begun, None
        if tap is not None:
            tap.remove()
        if run is None:
            return
        if begun is not None:
            run.drop_step("training ended within it")
        run.close(together=together)

    def __enter__(self) -> LoopscopeCallback:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A trainer that raised never says that training ended; its rows are written and its hooks removed here.
        if getattr(self, "run", None) is not None:
            self.close()

    def _go_on(self, model: Any, options: Mapping[str, Any]) -> Attachment | None:
        """The run that this callback made, gone on with as a new attempt; None where that fails."""
        try:
            return attach(model, out=self._out, **{**options, "resume": True}).open()
        except Exception as error:
            if options.get("on_error") == "raise":
                raise
            _log.error("training goes on without loopscope: %s: %s", type(error).__name__, error)
            return None


def loopscope_callback(out: str | Path, every: int = 10, **options: Any) -> LoopscopeCallback:
    """A callback for `transformers.Trainer`.

    Args:
        out: folder of the run.
        every: trace every N optimizer steps.
        options: as `loopscope.attach`.
    """
    return LoopscopeCallback(out, every=every, **options)


def _tokens(args: TrainingArguments, state: TrainerState) -> int | None:
    """Training tokens so far, where the trainer counts them."""
    counted = str(args.include_num_input_tokens_seen).lower() not in ("no", "false")
    return int(state.num_input_tokens_seen) if counted else None


def _rate(kwargs: Mapping[str, Any]) -> float | None:
    """The rate of the coming update where every parameter group has the same."""
    scheduler = kwargs.get("lr_scheduler")
    rates = set() if scheduler is None else set(scheduler.get_last_lr())
    return float(rates.pop()) if len(rates) == 1 else None
