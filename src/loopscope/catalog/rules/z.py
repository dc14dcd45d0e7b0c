"""`z`: the mean logsumexp and the largest logit, whichever is further out."""

import numpy as np

from loopscope.catalog.row_batch import RowBatch
from loopscope.catalog.rows import VISIT
from loopscope.catalog.rule import Judgement, Memory, Readings, Rule, RuleBounds, RuleCheck, number

_COLUMNS = ("num_experts", "z_mean", "logit_abs_max")


def _judge(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings:
    experts, mean, largest = (batch.floats(name) for name in _COLUMNS)
    bound = np.log(experts) + bounds.z_above
    # A sigmoid router has no z; its logits are judged still.
    by_mean = np.where(experts > 0, np.abs(mean) / bound, np.nan)
    by_logit = largest / bounds.logit_abs_max
    is_mean = (by_mean > by_logit) | np.isnan(by_logit)

    def text(i: int) -> str:
        if is_mean[i]:
            return f"z_mean {mean[i]:.3g}, bound {bound[i]:.3g}"
        return f"logit_abs_max {largest[i]:.3g}, bound {bounds.logit_abs_max:.3g}"

    def now(i: int) -> str:
        where = batch.visits.names[batch.visits.code[i]]
        return f"largest logit {number(largest[i])}, mean logsumexp {number(mean[i])} at {where}"

    return Readings(
        np.arange(len(mean)),
        np.where(is_mean, mean, largest),
        np.fmax(by_mean, by_logit),
        lambda: batch.visits,
        text,
        now,
    )


RULE = Rule(
    name="z",
    title="Router logits drift away from zero",
    bound="|z_mean| > ln E + {z_above:g}, or logit_abs_max > {logit_abs_max:g}",
    why="bfloat16 steps by 0.25 at 50; z < 0 for half the tokens is normal",
    chart="z",
    judgements=(Judgement(table="router", columns=(*VISIT, *_COLUMNS), judge=_judge),),
    check=RuleCheck(
        title="Router logits stay small",
        bound="{logit_abs_max:g}, and ln E + {z_above:g} either side of 0",
        missing="no router has a value",
    ),
)
