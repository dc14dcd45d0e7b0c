"""Losses from the model's output and from the trainer, kept until they may be read without waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loopscope.capture.adapter import Adapter, LossParts
from loopscope.trace import LossComponents

if TYPE_CHECKING:
    from loopscope.collect import Collector


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

    def on_host(self) -> _Step:
        """The same in plain numbers; waits for the device."""
        parts = [replace(part, total=_number(part.total), lb=_number(part.lb)) for part in self.parts]
        return replace(self, parts=parts, total=_number(self.total), grad_norm=_number(self.grad_norm))


class LossLog:
    """The objective by step. Reading device scalars waits for the device, so it comes late and in order."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._reads = True
        self.merge: Callable[[Any], list[Any]] | None = None
        """Gives what every rank has to say, in their order; None where there is one rank."""

    @property
    def is_merged(self) -> bool:
        """True where `write` is collective."""
        return self.merge is not None

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

    def write(self, collector: Collector, before: int, *, together: bool = True) -> None:
        """Write the rows of the steps before `before`, in order.

        Args:
            collector: takes them.
            before: the same on every rank, all of which come here.
            together: False where the other ranks do not come: there are no rows then, since one rank's loss is not that
                of the run.
        """
        for number, components, known in self.finished(before, together=together):
            if components is not None:
                collector.on_metrics_step(number, components, **known)
            else:
                detail = "no loss row: training ended before the ranks merged their losses of this step"
                collector.record_event(number, "loss_unread", "warn", detail=detail)

    def finished(
        self, before: int, *, together: bool = True
    ) -> Iterator[tuple[int, LossComponents | None, Mapping[str, Any]]]:
        """Take out the steps before `before`, in order: step, components, and what else `on_metrics_step` takes; no
        components where they are not known, see `write`."""
        numbers = sorted(number for number in self._steps if number < before)
        own = {number: self._steps.pop(number) for number in numbers}
        told = {number: step for number, step in own.items() if step.parts or step.total is not None}
        if self.merge is None:
            yield from ((number, *_of_step([step])) for number, step in told.items())
        elif not together:
            yield from ((number, None, {}) for number in told)
        else:
            by_rank = self.merge({number: step.on_host() for number, step in told.items()})
            for number in sorted({number for steps in by_rank for number in steps}):
                yield number, *_of_step([steps[number] for steps in by_rank if number in steps])


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


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _of_step(ranks: Sequence[_Step]) -> tuple[LossComponents, Mapping[str, Any]]:
    """Of what each rank keeps of one step. The objective is the mean over ranks, as their gradients are averaged; what
    the trainer tells is of all ranks already."""
    parts = [part for step in ranks for part in step.parts]
    # Where the loss was divided by the tokens of the whole step, microbatches add up; else they are averaged.
    is_partial = bool(parts) and parts[0].is_partial
    sums = [
        (math.fsum(float(part.total) for part in step.parts), len(step.parts)) for step in ranks if step.parts
    ]
    own = math.fsum(total / (1 if is_partial else count) for total, count in sums) / max(len(sums), 1)
    balancing = [float(part.lb) for part in parts if part.lb is not None]
    lb = math.fsum(balancing) / len(balancing) if balancing else 0.0
    # A balancing term that every microbatch adds whole is in the step's objective as often as there are microbatches.
    factor = parts[0].lb_factor * (len(parts) / len(sums) if is_partial else 1) if balancing else 0.0
    told, norm = _first(step.total for step in ranks), _first(step.grad_norm for step in ranks)
    objective = _first(step.objective for step in ranks)
    total = own if told is None else float(told)
    absent = {"z_loss": "the model's output tells none"}
    if not balancing:
        absent["lb_loss"] = "the model's output tells none"
    if not parts:
        absent |= dict.fromkeys(("task_loss", "closure_error"), "the trainer tells its total alone")
    elif told is None:
        absent["closure_error"] = "the model's output tells its total alone"
    if objective is not None:
        absent |= dict.fromkeys(("lb_loss_factor", "closure_error"), objective)
    components = LossComponents(
        task_loss=own - factor * lb if parts else total,
        lb_loss=lb,
        lb_loss_factor=factor,
        z_loss=0.0,
        z_loss_factor=0.0,
        total_loss=total,
    )
    return components, {
        "grad_norm": _number(norm),
        "lr": _first(step.lr for step in ranks),
        "absent": absent,
    }
