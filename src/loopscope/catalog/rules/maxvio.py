"""`maxvio`: the most overloaded expert, against what is possible and against what sampling alone shows."""

import numpy as np

from loopscope.catalog.row_batch import RowBatch
from loopscope.catalog.rows import VISIT
from loopscope.catalog.rule import Judgement, Memory, Readings, Rule, RuleBounds, RuleCheck

_COLUMNS = ("maxvio_count", "num_experts", "top_k", "num_tokens")


def _judge(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings:
    value, experts, k, tokens = (batch.floats(name) for name in _COLUMNS)
    most = experts / k - 1
    noise = bounds.maxvio_noise * np.sqrt(2 * np.log(experts) * experts / (k * tokens))
    bound = np.maximum(bounds.maxvio_share * most, noise)
    known = (tokens > 0) & (k > 0) & (experts > k)
    return Readings(
        np.arange(len(value)),
        value,
        np.where(known, value / bound, np.nan),
        lambda: batch.visits,
        lambda i: f"maxvio_count {value[i]:.3g}, bound {bound[i]:.3g}, largest possible {most[i]:.3g}",
        lambda i: (
            f"MaxVio {value[i]:.3g} at {batch.visits.names[batch.visits.code[i]]}, {most[i]:.3g} is possible"
        ),
        value > np.maximum(bounds.maxvio_critical * most, noise),
    )


RULE = Rule(
    name="maxvio",
    title="The busiest expert carries far more than its share",
    bound="maxvio_count > max({maxvio_share:g}·(E/k − 1), {maxvio_noise:g}·sqrt(2 ln E · E/(kT))) "
    "(critical: {maxvio_critical:g}·(E/k − 1))",
    why="its maximum is E/k − 1, so that no absolute bound works; the second term is sampling noise",
    chart="maxvio",
    judgements=(Judgement(table="router", columns=(*VISIT, *_COLUMNS), judge=_judge),),
    check=RuleCheck(
        title="No expert is overloaded",
        bound="at most {maxvio_share:.0%} of what is possible",
        missing="no router has a value",
    ),
)
