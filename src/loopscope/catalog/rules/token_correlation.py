"""`token_correlation`: how alike the tokens' states are at the last loop visit."""

import numpy as np

from loopscope.catalog.row_batch import RowBatch, Subjects, firsts
from loopscope.catalog.rule import Judgement, Memory, Readings, Rule, RuleBounds, RuleCheck

_COLUMN = "token_correlation"


def _judge(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings:
    loop = np.flatnonzero(batch.objects("block") == "loop")
    # The deepest first.
    order = loop[np.lexsort((-batch.ints("unrolled_pos")[loop], batch.step[loop]))]
    row = order[firsts(batch.step[order])]
    value = batch.floats(_COLUMN)[row]
    return Readings(
        row,
        value,
        value / bounds.token_correlation,
        lambda: Subjects(np.zeros(len(row), np.int64), ["last loop visit"]),
        lambda i: f"token_correlation {value[i]:.3g}, bound {bounds.token_correlation:g}",
        lambda i: f"mean cosine of two tokens {value[i]:.3g} after the loop",
    )


RULE = Rule(
    name="token_correlation",
    title="Tokens become alike",
    bound="token_correlation > {token_correlation:g} at the last loop visit",
    why="rank collapse: every position holds nearly the same vector",
    chart="token_correlation",
    judgements=(Judgement(table="residual", columns=("block", "unrolled_pos", _COLUMN), judge=_judge),),
    check=RuleCheck(
        title="Tokens stay different",
        bound="at most {token_correlation:g}",
        missing="no state of a loop has a value",
    ),
)
