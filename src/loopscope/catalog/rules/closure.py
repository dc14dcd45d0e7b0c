"""`closure`: the total loss against the sum of its parts."""

import numpy as np

from loopscope.catalog.row_batch import RowBatch, Subjects
from loopscope.catalog.rule import Judgement, Memory, Readings, Rule, RuleBounds, RuleCheck

_PARTS = {"lb_loss": "the load-balancing loss", "z_loss": "the z-loss"}
_COLUMNS = ("closure_error", "total_loss", *_PARTS, *(f"{name}_factor" for name in _PARTS))


def _judge(batch: RowBatch, bounds: RuleBounds, memory: Memory) -> Readings:
    error, total = batch.floats("closure_error"), batch.floats("total_loss")
    bound = bounds.closure * np.maximum(1.0, np.abs(total))
    excess = np.abs(error) / bound

    def text(i: int) -> str:
        guess = _explained(batch, i) if excess[i] > 1 else ""
        return f"closure_error {error[i]:.3g}, bound {bound[i]:.3g}{guess}"

    return Readings(
        np.arange(len(error)),
        error,
        excess,
        lambda: Subjects(np.zeros(len(error), np.int64), ["loss"]),
        text,
        lambda i: f"total and parts differ by at most {abs(error[i]):.2g} nats",
        ~np.isnan(excess),
    )


def _explained(batch: RowBatch, i: int) -> str:
    """The auxiliary loss that a closure error is a whole multiple of, in words; empty where none is."""
    for name, words in _PARTS.items():
        part = float(batch.floats(name)[i] * batch.floats(f"{name}_factor")[i])
        if not part or np.isnan(part):
            continue
        times = float(batch.floats("closure_error")[i]) / part
        if abs(times - round(times)) < 0.02 and round(times) != 0:
            count = 1 + round(times)
            often = {0: "not at all", 2: "twice", 3: "three times"}.get(count, f"{count} times")
            return f": {words} ({name}) is counted {often} in the total"
    return ""


RULE = Rule(
    name="closure",
    title="The total loss is not the sum of its parts",
    bound="|closure_error| > {closure:.3g} · max(1, |total_loss|)",
    why="float32 noise with margin; an auxiliary loss counted twice, or never, breaks it; there is no warm-up",
    chart="closure",
    warmup=False,
    judgements=(Judgement(table="loss", columns=_COLUMNS, judge=_judge),),
    check=RuleCheck(
        title="The losses add up", bound="{closure:g} of the total", missing="no step has a closure error"
    ),
)
