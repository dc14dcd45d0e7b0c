"""Loss over tokens, tokens per second, gradient norm and learning rate."""

from __future__ import annotations

from typing import Any

from loopscope.report.chart import Chart, ChartData, Section
from loopscope.report.charts.loss import long_rows
from loopscope.report.queries import LINE_BUCKETS, RunQueries
from loopscope.report.widgets import Mark, lines, x_step

_SPIKE = 3.0
_BEFORE = 50


def section(queries: RunQueries) -> Section:
    """Four charts over the loss table."""
    if not queries.has("loss"):
        return Section(
            id="speed", nav="Training", title="Training", text="The run has no row of the table loss yet."
        )
    scope = queries.scope("loss")
    buckets = queries.buckets("loss", LINE_BUCKETS)
    # Within an attempt alone: elapsed_s begins anew with each.
    source = f"""(
        select *, (tokens_seen - lag(tokens_seen) over w) / nullif(elapsed_s - lag(elapsed_s) over w, 0) as tps
        from loss where {scope.where} window w as (partition by attempt order by step))"""
    columns = ["task_loss", "tokens_seen as tokens", "tps", "grad_norm", "lr"]
    rows = queries.thinned(source, columns, buckets.per_bucket)
    thinned = (buckets.note,) if buckets.note else ()
    spikes, said = _spikes(queries, scope.where)

    def chart(name: str, column: str, title: str, text: str, unit: str, **more: Any) -> Chart:
        x = more.pop("x", "step")
        axis = x_step("training tokens", "tokens") if x == "tokens" else None
        stored = {"tps": ("tokens_seen", "elapsed_s")}.get(column, (column,))
        notes = (*thinned, *more.pop("notes", ()), *queries.missing("loss", stored))
        return Chart(
            id=name, title=title, text=text, spec=lines(y=unit, color="series", x=axis, **more),
            data=ChartData.of(long_rows(rows, {column: title.lower()}, x)), scope=scope.words, notes=notes,
            metrics=tuple(("loss", each) for each in stored),
        )  # fmt: skip

    charts = [
        chart(
            "loss_tokens", "task_loss", "Task loss over tokens", "The same loss against what was seen.", "nats",
            x="tokens",
        ),
        chart(
            "tokens_per_second", "tps", "Tokens per second", "Between two steps of one attempt, all ranks.",
            "tokens/s", zero=True,
        ),
        chart(
            "grad_norm", "grad_norm", "Gradient norm", f"Before clipping, on a logarithmic axis. {said}", "norm",
            log=_positive(rows, "grad_norm"), marks=spikes,
        ),
        chart("lr", "lr", "Learning rate", "Of the step's update.", "lr", zero=True),
    ]  # fmt: skip
    return Section(id="speed", nav="Training", title="Training", charts=charts)


def _positive(rows: list[dict[str, Any]], column: str) -> bool:
    return all(row[f"{column}_min"] is None or row[f"{column}_min"] > 0 for row in rows)


def _spikes(queries: RunQueries, where: str) -> tuple[list[Mark], str]:
    """Steps whose gradient norm is far above the steps before it; the largest fifty."""
    found = queries.rows(
        f"select step, grad_norm / before as times from (select step, grad_norm, median(grad_norm) over "
        f"(order by step rows between {_BEFORE} preceding and 1 preceding) as before, "
        f"row_number() over (order by step) as n from loss where {where} and isfinite(grad_norm)) "
        f"where n > 10 and before > 0 and grad_norm > {_SPIKE} * before order by times desc limit 50"
    )
    words = f"above {_SPIKE:g} times the median of the {_BEFORE} steps before"
    if not found:
        return [], f"No spike: no step is {words}."
    many = " (the 50 largest)" if len(found) == 50 else ""
    marks = [(int(row["step"]), f"{row['times']:.3g} times the median before") for row in found]
    spikes = "1 spike" if len(found) == 1 else f"{len(found)} spikes"
    return marks, f"Dashed lines: {spikes}{many}, {words}."
