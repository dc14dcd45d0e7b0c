"""Losses from the model's output and from the trainer, kept until they may be read without waiting."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loopscope.capture.adapter import Adapter, LossParts
from loopscope.trace import LossComponents


@dataclass(slots=True)
class _Step:
    lr: float | None = None
    parts: list[LossParts] = field(default_factory=list)
    """Of each microbatch."""
    total: Any = None
    """What the trainer itself says that backward ran on."""
    grad_norm: Any = None
    objective: str | None = None
    """Why the objective is not what the model's output says."""


class LossLog:
    """The objective by step. Reading device scalars waits for the device, so it comes late and in order."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._reads = True

    def read(
        self, adapter: Adapter, step: int, lr: float | None, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Keep what a forward's output says. Raises whatever the adapter raises, once: nothing is read after it."""
        if not self._reads:
            return
        try:
            parts = adapter.losses(kwargs, output)
        except Exception:
            self._reads = False
            raise
        if parts is not None:
            self.add(step, parts, lr)

    def stop_reading(self) -> None:
        """The loop tells its losses itself."""
        self._reads = False

    def add(self, step: int, parts: LossParts, lr: float | None) -> None:
        """Keep one forward's parts."""
        known = self._steps.setdefault(step, _Step())
        known.parts.append(parts)
        known.lr = lr if known.lr is None else known.lr

    def told(
        self, step: int, *, total: Any, grad_norm: Any, lr: float | None, objective: str | None = None
    ) -> None:
        """Keep what the trainer says of a step; None where it does not know."""
        known = self._steps.setdefault(step, _Step())
        known.total = known.total if total is None else total
        known.objective = objective or known.objective
        known.grad_norm = known.grad_norm if grad_norm is None else grad_norm
        known.lr = known.lr if lr is None else lr

    def drop(self, step: int) -> None:
        """Forget a step that did not come to its end."""
        self._steps.pop(step, None)

    def finished(self, before: int) -> Iterator[tuple[int, LossComponents, Mapping[str, Any]]]:
        """Take out the steps before `before`, in order: step, components, and what else `on_metrics_step` takes."""
        for number in sorted(number for number in self._steps if number < before):
            step = self._steps.pop(number)
            if step.parts or step.total is not None:
                yield number, *_of_step(step)


def as_components(loss: Any) -> tuple[LossComponents, dict[str, str]]:
    """The six components, and what is absent with its reason, of what a training loop hands over.

    Args:
        loss: the components, or a number or scalar tensor that is the objective, all of it the task's.
    """
    if isinstance(loss, LossComponents):
        return loss, {}
    total = float(loss.detach() if hasattr(loss, "detach") else loss)
    components = LossComponents(
        task_loss=total, lb_loss=0.0, lb_loss_factor=0.0, z_loss=0.0, z_loss_factor=0.0, total_loss=total
    )
    return components, dict.fromkeys(
        ("lb_loss", "z_loss", "closure_error"), "the total alone was handed over"
    )


def _of_step(step: _Step) -> tuple[LossComponents, Mapping[str, Any]]:
    parts, count = step.parts, len(step.parts)
    # Where the loss was divided by the tokens of the whole step, microbatches add up; else they are averaged.
    is_partial = bool(parts) and parts[0].is_partial
    own = sum(float(part.total) for part in parts) / (1 if is_partial else max(count, 1))
    balancing = [float(part.lb) for part in parts if part.lb is not None]
    lb = math.fsum(balancing) / len(balancing) if balancing else 0.0
    # A balancing term that every microbatch adds whole is in the step's objective as often as there are microbatches.
    factor = parts[0].lb_factor * (count if is_partial else 1) if balancing else 0.0
    total = own if step.total is None else float(step.total)
    absent = {"z_loss": "the model's output tells none"}
    if not balancing:
        absent["lb_loss"] = "the model's output tells none"
    if not parts:
        absent |= dict.fromkeys(("task_loss", "closure_error"), "the trainer tells its total alone")
    elif step.total is None:
        absent["closure_error"] = "the model's output tells its total alone"
    if step.objective is not None:
        absent |= dict.fromkeys(("lb_loss_factor", "closure_error"), step.objective)
    components = LossComponents(
        task_loss=own - factor * lb if parts else total,
        lb_loss=lb,
        lb_loss_factor=factor,
        z_loss=0.0,
        z_loss_factor=0.0,
        total_loss=total,
    )
    norm = None if step.grad_norm is None else float(step.grad_norm)
    return components, {"grad_norm": norm, "lr": step.lr, "absent": absent}
