"""Loss over tokens, tokens per second, gradient norm and learning rate."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc

from loopscope.report.chart import Chart, Section
from loopscope.report.charts.loss import series
from loopscope.report.queries import LINE_BUCKETS, RunQueries
from loopscope.report.widgets import Mark, lines, x_step

_SPIKE = 3.0
_BEFORE = 50
_MOST_SPIKES = 50


def section(queries: RunQueries) -> Section:
    """Four charts over the loss table."""
    if not queries.has("loss"):
        return Section(
            id="speed", nav="Training", title="Training", text="The run has no row of the table loss yet."
        )
    where = queries.scope("loss").where
    buckets = queries.buckets("loss", LINE_BUCKETS)
    # Within an attempt alone: elapsed_s begins anew with each.
    source = f"""(
        select *, (tokens_seen - lag(tokens_seen) over w) / nullif(elapsed_s - lag(elapsed_s) over w, 0) as tps
        from loss where {where} window w as (partition by attempt order by step))"""
    columns = ["task_loss", "tokens_seen as tokens", "tps", "grad_norm", "lr"]
    rows = queries.thinned(source, columns, buckets.per_bucket)
    spikes, said = _spikes(queries, where)

    def chart(
        name: str, column: str, title: str, text: str, unit: str, x: str = "step", **more: Any
    ) -> Chart:
        axis = x_step("training tokens", "tokens") if x == "tokens" else None
        stored = ("tokens_seen", "elapsed_s") if column == "tps" else (column,)
        return queries.chart(
            "loss", stored, buckets=buckets, id=name, title=title, text=text,
            spec=lines(y=unit, color="series", x=axis, **more), data=series(rows, {column: title.lower()}, x),
        )  # fmt: skip

    least = pc.min(rows["grad_norm_min"]).as_py()
    charts = [
        chart(
            "loss_tokens", "task_loss", "Task loss over tokens", "The same loss against what was seen.", "nats",
            "tokens",
        ),
        chart(
            "tokens_per_second", "tps", "Tokens per second", "Between two steps of one attempt, all ranks.",
            "tokens/s", zero=True,
        ),
        chart(
            "grad_norm", "grad_norm", "Gradient norm", f"Before clipping, on a logarithmic axis. {said}", "norm",
            log=least is None or least > 0, marks=spikes,
        ),
        chart("lr", "lr", "Learning rate", "Of the step's update.", "lr", zero=True),
    ]  # fmt: skip
    return Section(id="speed", nav="Training", title="Training", charts=charts)


def _spikes(queries: RunQueries, where: str) -> tuple[list[Mark], str]:
    """Steps whose gradient norm is far above the steps before it; the largest fifty."""
    found = queries.rows(
        f"select step, grad_norm / before as times from (select step, grad_norm, median(grad_norm) over "
        f"(order by step rows between {_BEFORE} preceding and 1 preceding) as before, "
        f"row_number() over (order by step) as n from loss where {where} and isfinite(grad_norm)) "
        f"where n > 10 and before > 0 and grad_norm > {_SPIKE} * before order by times desc limit {_MOST_SPIKES}"
    )
    words = f"above {_SPIKE:g} times the median of the {_BEFORE} steps before"
    if not found:
        return [], f"No spike: no step is {words}."
    many = f" (the {_MOST_SPIKES} largest)" if len(found) == _MOST_SPIKES else ""
    marks = [(row["step"], f"{row['times']:.3g} times the median before") for row in found]
    spikes = "1 spike" if len(found) == 1 else f"{len(found)} spikes"
    return marks, f"Dashed lines: {spikes}{many}, {words}."
