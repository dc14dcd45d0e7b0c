"""`nonfinite`: NaN and infinity in losses, router tensors and residuals."""

import numpy as np

from loopscope.catalog.row_batch import RowBatch, Subjects
from loopscope.catalog.rule import Judgement, Memory, Readings, Rule, RuleBounds, RuleCheck
from loopscope.catalog.rules.events import of_events

EVENTS = frozenset({"nonfinite", "nonfinite_loss"})


def _judge_loss(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings | None:
    fields = batch.column("nonfinite_fields")
    row = np.array([i for i, names in enumerate(fields) if names], dtype=np.int64)
    if not len(row):
        return None
    return Readings(
        row,
        np.ones(len(row)),
        np.full(len(row), np.inf),
        lambda: Subjects(np.zeros(len(row), np.int64), ["loss components"]),
        lambda i: f"not finite: {fields[row[i]]}",
        critical=np.ones(len(row), np.bool_),
    )


RULE = Rule(
    name="nonfinite",
    title="Values are not finite",
    bound="any NaN or infinity in losses, router tensors or residuals",
    why="never normal",
    chart="health",
    judgements=(
        Judgement(table="loss", columns=("nonfinite_fields",), judge=_judge_loss),
        of_events(EVENTS.__contains__),
    ),
    window="once",
    warmup=False,
    check=RuleCheck(title="Every value is finite", bound="none", missing="there are no rows", chart="counts"),
)
