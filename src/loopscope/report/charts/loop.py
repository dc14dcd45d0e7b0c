"""Whether the loop converges: size and movement of the hidden state per loop step."""

from __future__ import annotations

from typing import Any

from loopscope.analysis.records import value
from loopscope.report.chart import Chart, ChartData, Section
from loopscope.report.queries import SERIES_BUCKETS, RunQueries
from loopscope.report.widgets import lines

_MOST_SERIES = 12
_ONLY = {"residual": "block = 'loop'", "transition": "kind = 'step_boundary'"}
_CHARTS = (
    ("residual", "norm", "norm_mean", "Size of the hidden state", "Mean norm of the stack's output.", "norm", True),
    (
        "transition", "relative_delta", "relative_delta", "Movement from loop step to loop step",
        "‖h_r − h_(r−1)‖/‖h_(r−1)‖. Towards 0 the loop converges.", "relative delta", True,
    ),
    (
        "transition", "growth", "growth", "Growth from loop step to loop step",
        "‖h_r‖/‖h_(r−1)‖. Equal orthogonal updates give 1.41, 1.22, 1.15, ...; a growth that stays above 1.1 does not "
        "converge.", "growth", False,
    ),
    (
        "transition", "state_cosine", "state_cosine", "Direction kept from loop step to loop step",
        "cos(h_r, h_(r−1)). 1: the direction no longer changes.", "cosine", False,
    ),
    (
        "residual", "token_correlation", "token_correlation", "Likeness of a sequence's tokens",
        "Mean cosine over pairs of tokens; near 1 all positions hold the same vector.", "cosine", False,
    ),
)  # fmt: skip


def section(queries: RunQueries) -> Section:
    """One chart per quantity, over training, a line per loop step, at the stack's last layer."""
    charts = []
    bounds = {"growth": queries.settings.growth, "token_correlation": queries.settings.token_correlation}
    for table, name, column, title, text, unit, zero in _CHARTS:
        if not queries.has(table):
            continue
        found = _rows(queries, table, column)
        if found is None:
            continue
        rows, layer, note = found
        charts.append(
            Chart(
                id=name,
                title=title,
                text=f"{text} At the stack's last layer ({layer})."
                + (f" Dotted line: {bounds[name]:g}, the rule's bound." if name in bounds else ""),
                spec=lines(
                    y=unit,
                    color="loop step",
                    kind="ordinal",
                    zero=zero,
                    color_title="loop step",
                    bound=bounds.get(name),
                ),
                data=ChartData.of(rows),
                metrics=((table, column),),
                scope=queries.scope(table).words,
                notes=(*note, *queries.missing(table, (column,), _ONLY[table])),
            )
        )
    text = "" if charts else "No visit of a loop was traced."
    return Section(id="loop", nav="Loop", title="The loop", charts=charts, text=text)


def _rows(
    queries: RunQueries, table: str, column: str
) -> tuple[list[dict[str, Any]], int, tuple[str, ...]] | None:
    where = queries.scope(table).where
    only = _ONLY[table]
    step, layer = ("to_loop_step", "to_layer_idx") if table == "transition" else ("loop_step", "layer_idx")
    last = value(queries.run, f"select max({layer}) from {table} where {where} and {only}")
    if last is None:
        return None
    source = f"(select * from {table} where {where} and {only} and {layer} = {last})"
    present = [row["s"] for row in queries.rows(f"select distinct {step} as s from {source} order by s")]
    shown = _some(present)
    note = (
        () if shown == present else (f"Loop steps {', '.join(map(str, shown))} of {len(present)} are drawn.",)
    )
    buckets = queries.buckets(table, SERIES_BUCKETS)
    chosen = f"(select * from {source} where {step} in ({', '.join(map(str, shown))}))"
    rows = [
        {
            "step": row["step"], "loop step": row[step], "value": row[column], "low": row[f"{column}_min"],
            "high": row[f"{column}_max"],
        }
        for row in queries.thinned(chosen, [column], buckets.per_bucket, by=(step,))
    ]  # fmt: skip
    return rows, last, (*note, *((buckets.note,) if buckets.note else ()))


def _some(steps: list[int]) -> list[int]:
    """All loop steps, or evenly spread ones with the first and the last where they are many."""
    if len(steps) <= _MOST_SERIES:
        return steps
    last = len(steps) - 1
    return [steps[round(i * last / (_MOST_SERIES - 1))] for i in range(_MOST_SERIES)]
