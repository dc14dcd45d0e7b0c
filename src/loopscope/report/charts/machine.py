"""What the machines did meanwhile: seconds per step, and beside it processors, memory, disk, network, accelerators."""

from collections.abc import Mapping

from loopscope.report.chart import Chart
from loopscope.report.queries import LINE_BUCKETS, RunQueries
from loopscope.report.widgets import Mark, line_data, lines

_SLOW = 3.0
_BEFORE = 50
_MOST_MARKS = 20
_MOVED = 2.0
"""A figure moved where it is this many times its median, or its median this many times it."""
_CAUSES = ("cpu_percent", "gpu_percent", "sm_clock", "disk_read", "disk_written", "net_received", "net_sent")
"""What may move when a step is slow."""
_SECONDS = """(
    select step, (elapsed_s - lag(elapsed_s) over w) / nullif(step - lag(step) over w, 0) as seconds
    from loss where {where} window w as (partition by attempt order by step))"""


def charts(queries: RunQueries) -> list[Chart]:
    """Seconds per step with its slow ones, and the machines' own figures where there are any."""
    found = [_step_time(queries)]
    if not queries.has("system"):
        return found
    return [
        *found,
        _chart(
            queries, "machine_use", "Processors and accelerators", "Share of the time in which they were busy.", "%",
            {"cpu_percent": "processors", "gpu_percent": "kernels", "gpu_memory_percent": "accelerator memory"},
        ),
        _chart(
            queries, "machine_memory", "Memory", "Taken on the machine, by this process, and on each accelerator.",
            "bytes",
            {"memory_used": "machine", "process_memory": "this process", "gpu_memory_used": "accelerator"},
        ),
        _chart(
            queries, "machine_io", "Disk and network", "Of the whole machine, loopback left out.", "bytes/s",
            {"disk_read": "disk, read", "disk_written": "disk, written", "net_received": "network, received",
             "net_sent": "network, sent"},
        ),
        _chart(
            queries, "machine_heat", "Power and heat", "Of each accelerator, in watts and in degrees Celsius.",
            "W, °C", {"power": "power", "temperature": "temperature"},
        ),
    ]  # fmt: skip


def _step_time(queries: RunQueries) -> Chart:
    source = _SECONDS.format(where=queries.scope("loss").where)
    rows, buckets = queries.thinned(source, LINE_BUCKETS, ["seconds"])
    marks, said = _slow(queries, source)
    return queries.chart(
        "loss", ("elapsed_s",), buckets=buckets, id="step_time", title="Seconds per step",
        text=f"Between two steps of one attempt. {said}",
        spec=lines(y="s", color="series", zero=True, marks=marks),
        data=line_data(rows, "seconds", "series", "seconds per step", known=True),
    )  # fmt: skip


def _slow(queries: RunQueries, source: str) -> tuple[list[Mark], str]:
    """Steps that took far longer than those before, and what of the machine moved with them."""
    found = queries.rows(
        f"select step, seconds / before as times from (select step, seconds, median(seconds) over "
        f"(order by step rows between {_BEFORE} preceding and 1 preceding) as before, "
        f"row_number() over (order by step) as n from {source} where isfinite(seconds)) "
        f"where n > 10 and before > 0 and seconds > {_SLOW} * before order by times desc limit {_MOST_MARKS}"
    )
    words = f"above {_SLOW:g} times the median of the {_BEFORE} steps before"
    if not found:
        return [], f"No slow step: none is {words}."
    causes = _causes(queries, [row["step"] for row in found]) if queries.has("system") else {}
    marks = [
        (row["step"], f"{row['times']:.3g} times the median before{causes.get(row['step'], '')}")
        for row in found
    ]
    many = "1 slow step" if len(found) == 1 else f"{len(found)} slow steps"
    known = "" if causes or not queries.has("system") else " No figure of the machine moved with them."
    return marks, f"Dashed lines: {many}, {words}.{known}"


def _causes(queries: RunQueries, steps: list[int]) -> dict[int, str]:
    """Slow step → the figures that moved while it ran: what was seen then, not why."""
    # A sample names the last step that had ended: while step s ran, that was s - 1.
    inside = ", ".join(f"avg({name}) as {name}" for name in _CAUSES)
    usual = ", ".join(f"median({name}) as {name}" for name in _CAUSES)
    (median,) = queries.rows(f"select {usual} from system")
    listed = ", ".join(str(step - 1) for step in steps)
    said = {}
    for row in queries.rows(
        f"select step + 1 as step, {inside} from system where step in ({listed}) group by step"
    ):
        moved = [
            f"{name} {row[name]:.3g}, usually {median[name]:.3g}"
            for name in _CAUSES
            if _has_moved(row[name], median[name])
        ]
        if moved:
            said[int(row["step"])] = f"; {'; '.join(moved)}"
    return said


def _has_moved(now: float | None, usual: float | None) -> bool:
    return now is not None and usual is not None and not usual / _MOVED <= now <= usual * _MOVED


def _chart(
    queries: RunQueries, name: str, title: str, text: str, unit: str, columns: Mapping[str, str]
) -> Chart:
    """A line per column and device; per machine as well where there are several."""
    pairs = ", ".join(
        f"{{'what': '{label}', 'number': {column}::double}}" for column, label in columns.items()
    )
    source = f"""(
        select step, what || device || host as series, number from (
            select step, if(device = 'host', '', ' of ' || device) as device,
                if((select count(distinct host) from system) = 1, '', ', ' || host) as host,
                unnest([{pairs}], recursive := true)
            from system)
        where number is not null)"""
    rows, buckets = queries.thinned(source, LINE_BUCKETS, ["number"], by=("series",))
    return queries.chart(
        "system", tuple(columns), buckets=buckets, missing=(), id=name, title=title, text=text,
        spec=lines(y=unit, color="series", zero=True), data=line_data(rows, "number", "series", rows["series"]),
    )  # fmt: skip
