"""Losses from the model's output, kept as device scalars until they may be read without waiting."""

from collections.abc import Iterator

from loopscope.capture.adapter import LossParts
from loopscope.trace import LossComponents


class LossLog:
    """Parts of the objective by step and microbatch. Reading waits for the device, so it comes late and in order."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[list[LossParts], float | None]] = {}

    def add(self, step: int, parts: LossParts, lr: float | None) -> None:
        """Keep one forward's parts."""
        self._steps.setdefault(step, ([], lr))[0].append(parts)

    def finished(self, before: int) -> Iterator[tuple[int, LossComponents, float | None]]:
        """Take out the steps before `before`, in order."""
        for step in sorted(number for number in self._steps if number < before):
            parts, lr = self._steps.pop(step)
            yield step, _components(parts), lr


def _components(parts: list[LossParts]) -> LossComponents:
    # Where the loss was divided by the tokens of the whole step, microbatches add up; else they are averaged.
    share = 1.0 if parts[0].is_partial else 1.0 / len(parts)
    total = share * sum(float(part.total) for part in parts)
    lb = share * sum(float(part.lb) for part in parts if part.lb is not None)
    factor = parts[0].lb_factor
    return LossComponents(
        task_loss=total - factor * lb,
        lb_loss=lb,
        lb_loss_factor=factor,
        z_loss=0.0,
        z_loss_factor=0.0,
        total_loss=total,
    )
