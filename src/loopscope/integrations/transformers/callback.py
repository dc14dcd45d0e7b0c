"""The callback: attaches at the start of training, reports each step, closes at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from loopscope.session.attach import attach
from loopscope.session.attached import Attachment


class LoopscopeCallback(TrainerCallback):
    """Attaches to the trainer's model while it trains.

    Steps are the trainer's own optimizer steps; forwards of gradient accumulation are their microbatches, also where
    the last group of an epoch is smaller. Evaluation never counts. Rows: `router`, `residual`, `transition` and
    `health` at traced steps; `loss` every step, read from the model's output and written at the next traced step.

    Args:
        out: folder of the run.
        options: as `loopscope.attach`.
    """

    def __init__(self, out: str | Path, **options: Any) -> None:
        self._out, self._options = out, options
        self.run: Attachment | None = None
        """The attachment while training runs."""
        self._group = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach; everything that is wrong with the plan or the model is raised here."""
        self.close()
        options: dict[str, Any] = {
            "num_microbatches": args.gradient_accumulation_steps,
            "first_step": state.global_step + 1,
            "backend": "transformers",
            **self._options,
        }
        model = kwargs["model"]
        # The trainer may wrap the model for several ranks; hooks belong on what it wraps.
        if type(model).__name__ == "DistributedDataParallel":
            model = model.module
        self.run = attach(model, out=self._out, **options).open()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Name the step that begins, and its learning rate."""
        if self.run is not None:
            size = _group(args, kwargs, self._group)
            self.run.begin_step(state.global_step + 1, num_microbatches=size, lr=_rate(kwargs))
            self._group += 1

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Groups of gradient accumulation are counted within an epoch."""
        self._group = 0

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks and write what is left."""
        self.close()

    def close(self) -> None:
        """Remove the hooks and write what is left; a second call does nothing.

        transformers tells a callback nothing when training raises: where the trainer outlives that, use the callback
        in a `with` statement around ``trainer.train()``.
        """
        run, self.run = self.run, None
        if run is not None:
            run.close()

    def __enter__(self) -> LoopscopeCallback:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A trainer that raised never says that training ended; its rows are written and its hooks removed here.
        if getattr(self, "run", None) is not None:
            self.close()


def loopscope_callback(out: str | Path, every: int = 10, **options: Any) -> LoopscopeCallback:
    """A callback for `transformers.Trainer`.

    Args:
        out: folder of the run.
        every: trace every N optimizer steps.
        options: as `loopscope.attach`.
    """
    return LoopscopeCallback(out, every=every, **options)


def _group(args: TrainingArguments, kwargs: Mapping[str, Any], index: int) -> int:
    """Microbatches of the group `index` of an epoch: the last one may be smaller."""
    size = int(args.gradient_accumulation_steps)
    try:
        forwards = len(kwargs["train_dataloader"])
    except (KeyError, TypeError):  # a stream has no length
        return size
    return max(1, min(size, forwards - index * size))


def _rate(kwargs: Mapping[str, Any]) -> float | None:
    """The rate of the coming update where every parameter group has the same."""
    scheduler = kwargs.get("lr_scheduler")
    rates = set() if scheduler is None else set(scheduler.get_last_lr())
    return float(rates.pop()) if len(rates) == 1 else None
