"""`other`: every health event that is more than information and belongs to no other rule."""

from loopscope.catalog.rule import Rule
from loopscope.catalog.rules import bad_input, coverage, dropped, nonfinite
from loopscope.catalog.rules.events import of_events

# `closure` has a rule of its own over the loss rows, and an `alert` is what a rule said.
_ELSEWHERE = {"closure", "alert"}.union(
    *(module.EVENTS for module in (bad_input, coverage, dropped, nonfinite))
)

RULE = Rule(
    name="other",
    title="Something else was noticed",
    bound="any health event that is not information",
    why="it was written because somebody should look",
    chart="health",
    judgements=(of_events(lambda event: event not in _ELSEWHERE),),
    window="once",
    warmup=False,
)
