"""`loop_growth`: growth at one layer's last three step boundaries; where it falls, the reading is 0."""

import numpy as np

from loopscope.catalog.row_batch import PAIR, RowBatch
from loopscope.catalog.rule import Judgement, Memory, Readings, Rule, RuleBounds, RuleCheck
from loopscope.catalog.rules.loop_delta import layers

_FALL = 0.1
"""Growth − 1 must have lost this share over the last three loop steps to count as falling."""


def _judge(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings:
    pairs = batch.boundaries
    growth = batch.floats("growth")[pairs.row]
    there = np.flatnonzero(~np.isnan(growth))
    low, high = np.searchsorted(there, pairs.begins), np.searchsorted(there, pairs.ends)
    values = np.append(growth[there], np.nan)
    first, middle, last = (values[np.where(high - low >= back, high - back, -1)] for back in (3, 2, 1))
    falling = (first > middle) & (middle > last) & ((last - 1) < (1 - _FALL) * (first - 1))
    # In units of the bound's distance from 1: a state that keeps its size has an excess of 0.
    share = np.maximum(0.0, (last - 1) / (bounds.growth - 1)) if bounds.growth > 1 else last / bounds.growth

    def last_three(i: int) -> str:
        return ", ".join(f"{value[i]:.3g}" for value in (first, middle, last) if not np.isnan(value[i]))

    return Readings(
        pairs.row[pairs.ends - 1],
        last,
        np.where(np.isnan(first), np.nan, np.where(falling, 0.0, share)),
        lambda: layers(batch),
        lambda i: f"growth {last_three(i)} over the last loop steps, bound {bounds.growth:g}",
        lambda i: f"growth {last_three(i)} over the last passes, layer {pairs.layer[i]}",
    )


RULE = Rule(
    name="loop_growth",
    title="The hidden state keeps growing from loop step to loop step",
    bound="growth at the last step_boundary > {growth:g}, and not falling over the last 3 loop steps",
    why="equal orthogonal updates alone give 1.41, 1.22, 1.15: growth that falls is normal",
    chart="growth",
    judgements=(Judgement(table="transition", columns=(*PAIR, "growth"), judge=_judge),),
    check=RuleCheck(
        title="The state stops growing in the loop",
        bound="at most {growth:g}, or falling",
        missing="no loop has a value",
        unjudged="fewer than 3 are not judged",
    ),
)
