"""How a small disturbance of the loop's input grows from pass to pass."""

from __future__ import annotations

import altair as alt

from loopscope.report.chart import Chart, ChartData
from loopscope.report.charts.structure import last_visits
from loopscope.report.queries import SERIES_BUCKETS, RunQueries
from loopscope.report.widgets import lines

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
    if not queries.has("probe_perturbation"):
        return []
    rows = [
        r for r in last_visits(queries, "probe_perturbation", "amplification, flipped_share") if r["b"] == 1
    ]
    charts = []
    for name, column, title, text, unit in _LAST:
        data = [
            {"loop step": r["r"], "layer": r["l"], "value": r[column], "low": r[column], "high": r[column]}
            for r in rows if r[column] is not None
        ]  # fmt: skip
        charts.append(
            Chart(
                id=name,
                title=title,
                text=f"{text} At the probe after step {rows[0]['step'] if rows else '?'}.",
                spec=lines(
                    y=unit, color="layer", kind="ordinal", color_title="layer", points=True, band=False,
                    x=_loop_axis(sorted({r["r"] for r in rows})), zero=True,
                ),
                data=ChartData.of(data),
                metrics=(("probe_perturbation", column),),
                scope=queries.scope("probe_perturbation").words,
                notes=queries.missing("probe_perturbation", (column,)),
            )
        )  # fmt: skip
    return [*charts, *_rates(queries)]


def _rates(queries: RunQueries) -> list[Chart]:
    """The factor per pass up to the last one: below 1 the loop forgets."""
    scope = queries.scope("probe_perturbation")
    buckets = queries.buckets("probe_perturbation", SERIES_BUCKETS)
    source = (
        f"(select * from {queries.visits('probe_perturbation')} where b = 1 and distance_rate is not null "
        "qualify r = max(r) over (partition by step, l))"
    )
    rows = queries.thinned(source, ["distance_rate"], buckets.per_bucket, by=("l",))
    data = [
        {
            "step": r["step"], "layer": r["l"], "value": r["distance_rate"], "low": r["distance_rate_min"],
            "high": r["distance_rate_max"],
        }
        for r in rows
    ]  # fmt: skip
    return [
        Chart(
            id="perturbation_rate",
            title="Factor per pass of a small disturbance",
            text="Geometric mean over all passes, at every deep probe; a line per layer. Below the dotted line at 1 "
            "the loop forgets a disturbance, above it the loop is unstable.",
            spec=lines(
                y="factor per pass", color="layer", kind="ordinal", color_title="layer", points=True, bound=1.0,
                band=buckets.per_bucket > 1,
            ),
            data=ChartData.of(data),
            metrics=(("probe_perturbation", "distance_rate"),),
            scope=scope.words,
            notes=(
                *((buckets.note,) if buckets.note else ()),
                *queries.missing("probe_perturbation", ("distance_rate",)),
            ),
        )
    ]  # fmt: skip


def _loop_axis(steps: list[int]) -> alt.X:
    axis = alt.Axis(values=steps, format="d", labelOverlap=True)
    return alt.X("loop step:Q", title="loop step", axis=axis, scale=alt.Scale(nice=False))
