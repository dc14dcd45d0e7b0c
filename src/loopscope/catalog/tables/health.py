"""`health`: what loopscope noticed about the run, and about itself."""

from functools import partial

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.table import Column, TableSpec
from loopscope.catalog.tables.keys import RUN_KEYS

_text = partial(Column, type="string")

_gauge = partial(Gauge, table="health", column="value", how="only")

GAUGES = (
    _gauge(key="health/coverage", where=(("event", "coverage"),)),
    _gauge(key="health/trace_seconds", where=(("event", "timing"),)),
)

TABLE = TableSpec(
    name="health",
    doc="One row per event: coverage, dropped rows, errors as text, non-finite values, timings, alerts.",
    progress=False,
    version=2,
    oldest=2,
    columns=(
        *RUN_KEYS,
        _text(name="event", formula="what happened", unit="text", required=True),
        _text(name="severity", formula="info, warn or critical"),
        Column(name="unrolled_pos", type="int32", formula="the visit concerned; null where none"),
        Column(
            name="count",
            type="int64",
            formula="how many: rows dropped, values not finite, visits missing",
            unit="of the event",
        ),
        Column(
            name="value",
            formula="how much; coverage: visits seen / visits expected; timing: seconds of a traced step",
            unit="1 or s",
        ),
        _text(name="detail", formula="text for people"),
        _text(name="rule", formula="alert: the rule; null for other events", since=2),
        _text(name="subject", formula="alert: the visit, layer or event that it is about", since=2),
        Column(
            name="since",
            type="int64",
            formula="alert: step at which the bound was first broken",
            since=2,
        ),
    ),
    gauges=GAUGES,
)
