"""The table of losses: the loss and its parts; throughput, gradient norm and learning rate."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from loopscope.analysis.records import value
from loopscope.report.chart import Chart, Section
from loopscope.report.charts import machine
from loopscope.report.queries import LINE_BUCKETS, RunQueries
from loopscope.report.widgets import Mark, line_data, lines, x_step

_MOST_MARKS = 50
_SPIKE = 3.0
_BEFORE = 50
_NO_ROW = "The run has no row of the table loss yet."


def section(queries: RunQueries) -> Section:
    """Total and task loss, the auxiliary losses, the closure."""
    if not queries.has("loss"):
        return Section(id="loss", nav="Loss", title="Loss", text=_NO_ROW)
    columns = [
        "task_loss", "lb_loss_factor * lb_loss as lb", "z_loss_factor * z_loss as z", "other_loss as other",
        "total_loss as total", "lb_loss as lb_raw", "abs(closure_error) as closure",
        f"{queries.settings.closure} * greatest(1, abs(total_loss)) as bound", "lb_loss_factor as f_lb",
        "z_loss_factor as f_z",
    ]  # fmt: skip
    rows, buckets = queries.thinned(queries.speaking("loss"), LINE_BUCKETS, columns)
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


def training(queries: RunQueries) -> Section:
    """The loss over tokens, tokens per second, gradient norm and learning rate."""
    if not queries.has("loss"):
        return Section(id="speed", nav="Training", title="Training", text=_NO_ROW)
    where = queries.scope("loss").where
    # Within an attempt alone: elapsed_s begins anew with each.
    source = f"""(
        select *, (tokens_seen - lag(tokens_seen) over w) / nullif(elapsed_s - lag(elapsed_s) over w, 0) as tps
        from loss where {where} window w as (partition by attempt order by step))"""
    columns = ["task_loss", "tokens_seen as tokens", "tps", "grad_norm", "lr"]
    rows, buckets = queries.thinned(source, LINE_BUCKETS, columns)
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
        *machine.charts(queries),
    ]  # fmt: skip
    return Section(id="speed", nav="Training", title="Training", charts=charts)


def series(thinned: pa.Table, names: Mapping[str, str], x: str = "step") -> pa.Table:
    """A line per column (column → its name), one after the other; a column without any value is left out."""
    lines_of = (line_data(thinned, column, "series", name, x=x) for column, name in names.items())
    drawn = [line for line in lines_of if line["value"].null_count < line.num_rows]
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
    marks = [
        (
            each.first_step,
            f"attempt {each.attempt} began "
            + (f"from attempt {each.parent_attempt}" if each.parent_attempt in known else "afresh"),
        )
        for each in queries.run.attempts[1:]
    ]
    if not marks:
        return [], ""
    said = "; ".join(what.replace("began", f"began at step {step}") for step, what in marks[:6])
    gone = value(queries.run, "select (select count(*) from loss_all) - (select count(*) from loss)")
    rolled = f" {gone:,} rows that a rollback replaced are not drawn." if gone else ""
    return marks[:_MOST_MARKS], f" Dashed lines: {said}{'; ...' if len(marks) > 6 else ''}.{rolled}"


def _spikes(queries: RunQueries, where: str) -> tuple[list[Mark], str]:
    """Steps whose gradient norm is far above the steps before it; the largest fifty."""
    found = queries.rows(
        f"select step, grad_norm / before as times from (select step, grad_norm, median(grad_norm) over "
        f"(order by step rows between {_BEFORE} preceding and 1 preceding) as before, "
        f"row_number() over (order by step) as n from loss where {where} and isfinite(grad_norm)) "
        f"where n > 10 and before > 0 and grad_norm > {_SPIKE} * before order by times desc limit {_MOST_MARKS}"
    )
    words = f"above {_SPIKE:g} times the median of the {_BEFORE} steps before"
    if not found:
        return [], f"No spike: no step is {words}."
    many = f" (the {_MOST_MARKS} largest)" if len(found) == _MOST_MARKS else ""
    marks = [(row["step"], f"{row['times']:.3g} times the median before") for row in found]
    spikes = "1 spike" if len(found) == 1 else f"{len(found)} spikes"
    return marks, f"Dashed lines: {spikes}{many}, {words}."
