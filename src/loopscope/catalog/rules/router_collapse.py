"""`router_collapse`: token entropy and mutual information, both below their bounds."""

import numpy as np

from loopscope.catalog.row_batch import RowBatch
from loopscope.catalog.rows import VISIT
from loopscope.catalog.rule import Judgement, Memory, Readings, Rule, RuleBounds, RuleCheck

_COLUMNS = ("token_entropy_ratio", "mutual_information", "num_experts")


def _judge(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings:
    entropy, mutual, experts = (batch.floats(name) for name in _COLUMNS)
    share = mutual / np.log(experts)
    worst = np.maximum(entropy, share)
    excess = np.where(worst > 0, bounds.collapse / worst, np.inf)
    known = (experts >= 2) & ~np.isnan(worst)
    return Readings(
        np.arange(len(worst)),
        worst,
        np.where(known, excess, np.nan),
        lambda: batch.visits,
        lambda i: (
            f"token_entropy_ratio {entropy[i]:.3g}, mutual_information {share[i]:.3g} ln E, "
            f"bound {bounds.collapse:g}"
        ),
        lambda i: f"token entropy {entropy[i]:.3g} of 1 at {batch.visits.names[batch.visits.code[i]]}",
        known,
    )


RULE = Rule(
    name="router_collapse",
    title="The router collapsed: it is sure, and makes the same choice for every token",
    bound="token_entropy_ratio < {collapse:g} and mutual_information < {collapse:g} · ln E",
    why="either alone is normal in a specialised router",
    chart="token_entropy",
    judgements=(Judgement(table="router", columns=(*VISIT, *_COLUMNS), judge=_judge),),
    check=RuleCheck(
        title="Routers tell tokens apart",
        bound="at least {collapse:g}, or as much mutual information",
        missing="no router has a value",
    ),
)
