"""The loss and its parts over steps."""

from __future__ import annotations

from typing import Any

from loopscope.report.chart import Chart, ChartData, Section
from loopscope.report.queries import LINE_BUCKETS, RunQueries
from loopscope.report.widgets import Mark, lines

_PARTS = ("task_loss", "lb_loss_factor * lb_loss as lb", "z_loss_factor * z_loss as z", "other_loss as other")


def section(queries: RunQueries) -> Section:
    """Total and task loss, the auxiliary losses, the closure."""
    if not queries.has("loss"):
        return Section(id="loss", nav="Loss", title="Loss", text="The run has no row of the table loss yet.")
    scope = queries.scope("loss")
    buckets = queries.buckets("loss", LINE_BUCKETS)
    source = f"(select * from loss where {scope.where})"
    columns = [
        *_PARTS, "total_loss as total", "lb_loss as lb_raw", "z_loss as z_raw", "abs(closure_error) as closure",
        f"{queries.settings.closure} * greatest(1, abs(total_loss)) as bound", "lb_loss_factor as f_lb",
        "z_loss_factor as f_z",
    ]  # fmt: skip
    rows = queries.thinned(source, columns, buckets.per_bucket)
    marks, said = _attempts(queries)
    shared: dict[str, Any] = {"scope": scope.words}
    thinned = (buckets.note,) if buckets.note else ()
    charts = [
        Chart(
            id="loss",
            title="Task and total loss",
            text=f"Task loss is the cross-entropy; the total adds the weighted auxiliary losses.{said}",
            spec=lines(y="nats", color="series", marks=marks),
            data=_long(rows, {"task_loss": "task loss", "total": "total loss"}),
            metrics=(("loss", "task_loss"), ("loss", "total_loss")),
            notes=(*thinned, *queries.missing("loss", ("task_loss", "total_loss"))),
            **shared,
        ),
        Chart(
            id="weighted",
            title="What the auxiliary losses add",
            text=f"Each auxiliary loss times its factor, as it enters the total. {_factors(rows)}",
            spec=lines(y="nats", color="series", marks=marks, zero=True),
            data=_long(rows, {"lb": "load balancing", "z": "router z", "other": "other"}),
            metrics=(("loss", "lb_loss_factor"), ("loss", "z_loss_factor"), ("loss", "other_loss")),
            notes=(*thinned, *queries.missing("loss", ("lb_loss_factor", "z_loss_factor"))),
            **shared,
        ),
        Chart(
            id="lb_loss",
            title="Load-balancing loss",
            text="Before its factor. 1 is a balanced load; the largest possible value is the number of experts.",
            spec=lines(y="lb_loss", color="series", marks=marks),
            data=_long(rows, {"lb_raw": "load balancing"}),
            metrics=(("loss", "lb_loss"),),
            notes=(*thinned, *queries.missing("loss", ("lb_loss",))),
            **shared,
        ),
        Chart(
            id="closure",
            title="Closure: is the total the sum of its parts?",
            text="|total − (task + f_lb·lb + f_z·z + other)|, on an axis that is logarithmic from 1e-8 on. Above the "
            "dashed line a part is counted wrongly; far below it is the noise of float32.",
            spec=lines(y="|closure error|, nats", color="series", symlog=1e-8, marks=marks),
            data=_long(rows, {"closure": "closure error", "bound": "bound"}),
            metrics=(("loss", "closure_error"),),
            notes=(*thinned, *queries.missing("loss", ("closure_error",))),
            **shared,
        ),
    ]
    return Section(id="loss", nav="Loss", title="Loss", charts=charts)


def long_rows(rows: list[dict[str, Any]], series: dict[str, str], x: str = "step") -> list[dict[str, Any]]:
    """Wide thinned rows as one row per series and bucket; a series without any value is left out."""
    return [
        {x: row[x], "series": name, "value": row[c], "low": row[f"{c}_min"], "high": row[f"{c}_max"]}
        for c, name in series.items() if any(row[c] is not None for row in rows)
        for row in rows
    ]  # fmt: skip


def _long(rows: list[dict[str, Any]], series: dict[str, str]) -> ChartData:
    return ChartData.of(long_rows(rows, series))


def _factors(rows: list[dict[str, Any]]) -> str:
    said = []
    for column, name in (("f_lb", "Load-balancing factor"), ("f_z", "z-loss factor")):
        low = min((r[f"{column}_min"] for r in rows if r[f"{column}_min"] is not None), default=None)
        high = max((r[f"{column}_max"] for r in rows if r[f"{column}_max"] is not None), default=None)
        if low is None:
            continue
        said.append(f"{name}: {low:g}." if low == high else f"{name}: from {low:g} to {high:g}.")
    return " ".join(said)


def _attempts(queries: RunQueries) -> tuple[list[Mark], str]:
    """Steps at which an attempt took over, and what that replaced."""
    marks: list[Mark] = []
    said = []
    for attempt in queries.run.attempts[1:]:
        parent = next((a for a in queries.run.attempts if a.attempt == attempt.parent_attempt), None)
        origin = "afresh" if parent is None else f"from attempt {parent.attempt}"
        marks.append((attempt.first_step, f"attempt {attempt.attempt} began {origin}"))
        said.append(f"attempt {attempt.attempt} began at step {attempt.first_step} {origin}")
    if not said:
        return [], ""
    gone = (
        queries.rows("select count(*) as n from loss_all")[0]["n"]
        - queries.rows("select count(*) as n from loss")[0]["n"]
    )
    shown = "; ".join(said[:6]) + ("; ..." if len(said) > 6 else "")
    rolled = f" {gone:,} rows that a rollback replaced are not drawn." if gone else ""
    return marks[:50], f" Dashed lines: {shown}.{rolled}"
