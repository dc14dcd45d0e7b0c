"""`dropped`: rows and measurements that were lost."""

from loopscope.catalog.rule import Rule
from loopscope.catalog.rules.events import of_events

EVENTS = frozenset({"dropped_rows", "error", "visit_failed", "metric_failed", "rank_failed", "bad_value"})

RULE = Rule(
    name="dropped",
    title="Measurements were lost",
    bound="any row or measurement dropped",
    why="never normal: the disk is full, or loopscope itself failed",
    chart="health",
    judgements=(of_events(EVENTS.__contains__),),
    window="once",
    warmup=False,
)
