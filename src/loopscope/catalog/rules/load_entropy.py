"""`load_entropy`: the load's evenness, as a shortfall from 1."""

import numpy as np

from loopscope.catalog.row_batch import RowBatch
from loopscope.catalog.rows import VISIT
from loopscope.catalog.rule import Judgement, Memory, Readings, Rule, RuleBounds, RuleCheck

_COLUMN = "load_entropy_ratio"


def _judge(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings:
    value, bound = batch.floats(_COLUMN), bounds.load_entropy
    return Readings(
        np.arange(len(value)),
        value,
        (1 - value) / (1 - bound) if bound < 1 else bound / np.maximum(value, 1e-12),
        lambda: batch.visits,
        lambda i: f"{_COLUMN} {value[i]:.3g}, bound {bound:g}",
        lambda i: f"load entropy {value[i]:.3g} of 1 at {batch.visits.names[batch.visits.code[i]]}",
        value < bounds.load_entropy_critical,
    )


RULE = Rule(
    name="load_entropy",
    title="A few experts carry the load",
    bound="load_entropy_ratio < {load_entropy:g} (critical: {load_entropy_critical:g})",
    why="token entropy alone falls when experts specialise, so there is no rule on it",
    chart="load_entropy",
    judgements=(Judgement(table="router", columns=(*VISIT, _COLUMN), judge=_judge),),
    check=RuleCheck(
        title="The load is spread over the experts",
        bound="at least {load_entropy:g}",
        missing="no router has a value",
    ),
)
