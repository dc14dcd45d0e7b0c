"""The loss and its parts over steps."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from loopscope.analysis.records import value
from loopscope.report.chart import Section
from loopscope.report.queries import LINE_BUCKETS, RunQueries
from loopscope.report.widgets import Mark, line_data, lines

_MOST_MARKS = 50


def section(queries: RunQueries) -> Section:
    """Total and task loss, the auxiliary losses, the closure."""
    if not queries.has("loss"):
        return Section(id="loss", nav="Loss", title="Loss", text="The run has no row of the table loss yet.")
    buckets = queries.buckets("loss", LINE_BUCKETS)
    columns = [
        "task_loss", "lb_loss_factor * lb_loss as lb", "z_loss_factor * z_loss as z", "other_loss as other",
        "total_loss as total", "lb_loss as lb_raw", "abs(closure_error) as closure",
        f"{queries.settings.closure} * greatest(1, abs(total_loss)) as bound", "lb_loss_factor as f_lb",
        "z_loss_factor as f_z",
    ]  # fmt: skip
    source = f"(select * from loss where {queries.scope('loss').where})"
    rows = queries.thinned(source, columns, buckets.per_bucket)
    marks, said = _attempts(queries)
    charts = [
        queries.chart(
            "loss",
            ("task_loss", "total_loss"),
            buckets=buckets,
            id="loss",
            title="Task and total loss",
            text=f"Task loss is the cross-entropy; the total adds the weighted auxiliary losses.{said}",
            spec=lines(y="nats", color="series", marks=marks),
            data=series(rows, {"task_loss": "task loss", "total": "total loss"}),
        ),
        queries.chart(
            "loss",
            ("lb_loss_factor", "z_loss_factor", "other_loss"),
            buckets=buckets,
            missing=("lb_loss_factor", "z_loss_factor"),
            id="weighted",
            title="What the auxiliary losses add",
            text=f"Each auxiliary loss times its factor, as it enters the total. {_factors(rows)}",
            spec=lines(y="nats", color="series", marks=marks, zero=True),
            data=series(rows, {"lb": "load balancing", "z": "router z", "other": "other"}),
        ),
        queries.chart(
            "loss",
            ("lb_loss",),
            buckets=buckets,
            id="lb_loss",
            title="Load-balancing loss",
            text="Before its factor. 1 is a balanced load; the largest possible value is the number of experts.",
            spec=lines(y="lb_loss", color="series", marks=marks),
            data=series(rows, {"lb_raw": "load balancing"}),
        ),
        queries.chart(
            "loss",
            ("closure_error",),
            buckets=buckets,
            id="closure",
            title="Closure: is the total the sum of its parts?",
            text="|total − (task + f_lb·lb + f_z·z + other)|, on an axis that is logarithmic from 1e-8 on. Above the "
            "dashed line a part is counted wrongly; far below it is the noise of float32.",
            spec=lines(y="|closure error|, nats", color="series", symlog=1e-8, marks=marks),
            data=series(rows, {"closure": "closure error", "bound": "bound"}),
        ),
    ]
    return Section(id="loss", nav="Loss", title="Loss", charts=charts)


def series(thinned: pa.Table, names: Mapping[str, str], x: str = "step") -> pa.Table:
    """A line per column (column → its name), one after the other; a column without any value is left out."""
    drawn = [line_data(thinned, column, "series", name, x=x) for column, name in names.items()]
    drawn = [line for line in drawn if line["value"].null_count < line.num_rows]
    return pa.concat_tables(drawn) if drawn else pa.table({})


def _factors(rows: pa.Table) -> str:
    said = []
    for column, name in (("f_lb", "Load-balancing factor"), ("f_z", "z-loss factor")):
        low, high = pc.min(rows[f"{column}_min"]).as_py(), pc.max(rows[f"{column}_max"]).as_py()
        if low is not None:
            said.append(f"{name}: {low:g}." if low == high else f"{name}: from {low:g} to {high:g}.")
    return " ".join(said)


def _attempts(queries: RunQueries) -> tuple[list[Mark], str]:
    """Steps at which an attempt took over, and what that replaced."""
    known = {attempt.attempt for attempt in queries.run.attempts}
    marks: list[Mark] = []
    for attempt in queries.run.attempts[1:]:
        parent = attempt.parent_attempt
        origin = f"from attempt {parent}" if parent in known else "afresh"
        marks.append((attempt.first_step, f"attempt {attempt.attempt} began {origin}"))
    if not marks:
        return [], ""
    said = "; ".join(what.replace("began", f"began at step {step}") for step, what in marks[:6])
    gone = value(queries.run, "select (select count(*) from loss_all) - (select count(*) from loss)")
    rolled = f" {gone:,} rows that a rollback replaced are not drawn." if gone else ""
    return marks[:_MOST_MARKS], f" Dashed lines: {said}{'; ...' if len(marks) > 6 else ''}.{rolled}"
