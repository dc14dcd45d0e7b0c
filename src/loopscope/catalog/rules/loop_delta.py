"""`loop_delta`: how far a layer's last pass moves the state, against the best mean that the run has had."""

import math
from dataclasses import dataclass, field

import numpy as np

from loopscope.catalog.row_batch import PAIR, RowBatch, Subjects
from loopscope.catalog.rule import Judgement, Readings, Rule, RuleBounds, RuleCheck


@dataclass(slots=True)
class BestMean:
    """The smallest mean of `window` values in a row so far."""

    best: float = math.nan
    """NaN before there were as many."""
    last: list[float] = field(default_factory=list)
    """The newest values, at most `window`."""

    def see(self, value: float, window: int) -> float:
        """Take the next value in; the best mean before it, NaN where there was none."""
        before = self.best
        self.last.append(value)
        del self.last[:-window]
        if len(self.last) == window:
            # Summed anew: a running sum never recovers from one huge value that went through it.
            mean = math.fsum(self.last) / window
            self.best = mean if math.isnan(before) else min(before, mean)
        return before


def layers(batch: RowBatch) -> Subjects:
    """The layers that a loop's step boundaries are of, one per group."""
    numbers, code = np.unique(batch.boundaries.layer, return_inverse=True)
    return Subjects(code, [f"layer {layer}" for layer in numbers])


def _judge(batch: RowBatch, bounds: RuleBounds, memory: dict[tuple[int, int], BestMean]) -> Readings:
    pairs = batch.boundaries
    row = pairs.row[pairs.ends - 1]
    value, best = batch.floats("relative_delta")[row], np.full(len(row), np.nan)
    # Loops of another depth end at another place: a best mean belongs to one depth.
    ends = zip(pairs.layer.tolist(), pairs.loop_step.tolist(), strict=True)
    for i, (end, delta) in enumerate(zip(ends, value.tolist(), strict=True)):
        if not math.isnan(delta):
            best[i] = memory.setdefault(end, BestMean()).see(delta, bounds.sustain)
    bound = bounds.relative_delta * best
    return Readings(
        row,
        value,
        np.where(best > 0, value / bound, np.nan),
        lambda: layers(batch),
        lambda i: f"relative_delta {value[i]:.3g}, best mean {best[i]:.3g}, bound {bound[i]:.3g}",
        lambda i: (
            f"the last pass moves the state by {value[i]:.3g}, at best by {best[i]:.3g}, layer {pairs.layer[i]}"
        ),
    )


RULE = Rule(
    name="loop_delta",
    title="The loop moves further than it once did",
    bound="relative_delta at the last step_boundary > {relative_delta:g} × its best mean over {sustain} traces",
    why="a loop that converged and does so no more; relative to itself, so that depth does not matter",
    chart="relative_delta",
    judgements=(Judgement(table="transition", columns=(*PAIR, "relative_delta"), judge=_judge),),
    check=RuleCheck(
        title="The loop settles as it once did",
        bound="at most {relative_delta:g} times its best",
        missing="no whole window of a loop's traces yet",
    ),
)
