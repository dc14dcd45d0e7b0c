"""`coverage`: visits that were promised and not seen, or seen and not promised."""

from loopscope.catalog.rule import Rule, RuleCheck
from loopscope.catalog.rules.events import of_events

EVENTS = frozenset(
    {
        "coverage",
        "probe_coverage",
        "unexpected_visits",
        "trace_incomplete",
        "depth_differs",
        "sink_fault",
        "no_trace",
        "not_called",
        "capture_failed",
    }
)

RULE = Rule(
    name="coverage",
    title="Visits were not seen as promised",
    bound="any expected visit missing, or any unexpected one",
    why="never normal: a hook is silent, or the model is not the one that its configuration promises",
    chart="coverage",
    judgements=(of_events(EVENTS.__contains__),),
    window="once",
    warmup=False,
    check=RuleCheck(
        title="Everything was measured",
        bound="every visit, no event",
        missing="nothing was traced",
        also=("dropped", "bad_input", "other"),
    ),
)
