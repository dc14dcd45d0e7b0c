"""What a `transformers.Trainer` computes and tells no callback: each microbatch's loss, each step's gradient norm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback


class TrainerTap:
    """Listens to two methods of one trainer: `training_step` gives what backward ran on, scaled so that the
    microbatches of a step add up, and `_get_grad_norm` (where this version has it) the norm before clipping.

    Both values stay on their device; nothing is read and nothing is changed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._losses: list[Any] = []
        self._grad_norm: Any = None
        self._hidden: dict[str, Any] = {}
        self._listen("training_step", self._losses.append)
        self._listen("_get_grad_norm", self._take_norm)

    @property
    def objective(self) -> str | None:
        """Why the objective is not what the model's output says; None where it is."""
        trainer: Any = self.trainer
        if type(trainer).compute_loss is not Trainer.compute_loss:
            return f"{type(trainer).__name__}.compute_loss makes the objective"
        if getattr(trainer, "compute_loss_func", None) is not None:
            return "compute_loss_func makes the objective"
        if getattr(trainer, "label_smoother", None) is not None:
            return "the trainer smooths the labels"
        return None

    def take(self) -> tuple[Any, Any]:
        """The loss and the gradient norm since the last call: scalars on their device; None where there is none."""
        losses, norm = list(self._losses), self._grad_norm
        self._losses.clear()
        self._grad_norm = None
        return (sum(losses) if losses else None), norm

    def remove(self) -> None:
        """Let the trainer run as it did. A second call does nothing."""
        for name, before in self._hidden.items():
            if before is None:
                vars(self.trainer).pop(name, None)
            else:
                setattr(self.trainer, name, before)
        self._hidden.clear()

    def _take_norm(self, norm: Any) -> None:
        self._grad_norm = norm

    def _listen(self, name: str, tell: Callable[[Any], None]) -> None:
        if (method := getattr(self.trainer, name, None)) is None:
            return
        self._hidden[name] = vars(self.trainer).get(name)

        def told(*args: Any, **kwargs: Any) -> Any:
            value = method(*args, **kwargs)
            tell(value)
            return value

        setattr(self.trainer, name, told)


def trainer_of(callback: TrainerCallback) -> Trainer | None:
    """The trainer that is calling `callback`; None where it is called by hand.

    transformers hands a callback everything but the trainer, whose frame is above the callback's.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_argcount else None
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None
