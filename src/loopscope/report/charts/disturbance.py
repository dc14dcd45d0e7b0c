"""How a small disturbance of the loop's input grows from pass to pass."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from loopscope.catalog.rows import BLOCKS
from loopscope.report.chart import Chart
from loopscope.report.charts.structure import last_visits
from loopscope.report.queries import SERIES_BUCKETS, RunQueries
from loopscope.report.widgets import field, line_data, lines

_TABLE = "probe_perturbation"
# id, column, title, how to read it, unit
_LAST = (
    (
        "perturbation", "amplification", "Growth of a small disturbance",
        "At the input of the first pass; a line per layer. Falling: the loop forgets it; rising: it grows with every "
        "pass.", "amplification",
    ),
    (
        "flipped", "flipped_share", "Choices that a small disturbance changes",
        "Share of tokens with another set of experts than without it; a line per layer. Many flips by a small "
        "disturbance: the choice hangs by a hair.", "share of tokens",
    ),
)  # fmt: skip


def disturbances(queries: RunQueries) -> list[Chart]:
    """By loop step at the last deep probe, and the factor per pass over training."""
    rows = last_visits(queries, _TABLE, "amplification, flipped_share")
    if not rows.num_rows:
        return []
    rows = rows.filter(pc.field("b") == BLOCKS.index("loop"))
    step = rows["step"][0] if rows.num_rows else "?"
    axis = {"values": sorted(rows["r"].unique().to_pylist()), "format": "d", "labelOverlap": True}
    x = field("loop step", title="loop step", axis=axis, scale={"nice": False})
    charts = []
    for name, column, title, text, unit in _LAST:
        known = rows.filter(rows[column].is_valid())
        value = known[column]
        data = {"loop step": known["r"], "layer": known["l"], "value": value, "low": value, "high": value}
        charts.append(
            queries.chart(
                _TABLE,
                (column,),
                id=name,
                title=title,
                text=f"{text} At the probe after step {step}.",
                spec=lines(
                    y=unit, color="layer", kind="ordinal", color_title="layer", points=True, band=False, x=x, zero=True
                ),
                data=pa.table(data),
            )
        )  # fmt: skip
    return [*charts, _rates(queries)]


def _rates(queries: RunQueries) -> Chart:
    """The factor per pass up to the last one: below 1 the loop forgets."""
    buckets = queries.buckets(_TABLE, SERIES_BUCKETS)
    source = (
        f"(select * from {queries.visits(_TABLE)} where b = 1 and distance_rate is not null "
        "qualify r = max(r) over (partition by step, l))"
    )
    rows = queries.thinned(source, ["distance_rate"], buckets.per_bucket, by=("l",))
    return queries.chart(
        _TABLE,
        ("distance_rate",),
        buckets=buckets,
        id="perturbation_rate",
        title="Factor per pass of a small disturbance",
        text="Geometric mean over all passes, at every deep probe; a line per layer. Below the dotted line at 1 "
        "the loop forgets a disturbance, above it the loop is unstable.",
        spec=lines(
            y="factor per pass", color="layer", kind="ordinal", color_title="layer", points=True, bound=1.0,
            band=buckets.per_bucket > 1,
        ),
        data=line_data(rows, "distance_rate", "layer", rows["l"]),
    )  # fmt: skip
