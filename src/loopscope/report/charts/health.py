"""Whether the measurement itself can be trusted, and what it costs."""

from __future__ import annotations

from loopscope.report.chart import Chart, ChartData, Section, Table
from loopscope.report.charts.loss import long_rows
from loopscope.report.queries import LINE_BUCKETS, RunQueries
from loopscope.report.widgets import lines

_METRICS = (("health", "event"), ("health", "value"))


def section(queries: RunQueries) -> Section:
    """Coverage, loopscope's own time, every event that is not information, everything wrong with the files."""
    charts = [*_coverage(queries), *_cost(queries), *_lost(queries)] if queries.has("health") else []
    tables = [_counts(queries), _events(queries), _problems(queries), _missing(queries)]
    text = "" if charts else "The run has no row of the table health."
    return Section(
        id="health", nav="Health", title="Health of the measurement", charts=charts, tables=tables, text=text
    )


def _coverage(queries: RunQueries) -> list[Chart]:
    rows = queries.thinned(
        "(select * from health where event = 'coverage')", ["value"], _size(queries, "coverage")
    )
    if not rows:
        return []
    return [
        Chart(
            id="coverage",
            title="Coverage",
            text="Share of the promised visits that a trace saw. Below 1 a hook is silent, or the model changed.",
            spec=lines(y="seen / expected", color="series", zero=True),
            data=ChartData.of(long_rows(rows, {"value": "coverage"})),
            metrics=_METRICS,
            scope=queries.scope("health").words,
            notes=_note(queries, "coverage"),
        )
    ]


def _cost(queries: RunQueries) -> list[Chart]:
    rows = queries.thinned(
        "(select * from health where event = 'timing')", ["value"], _size(queries, "timing")
    )
    if not rows:
        return []
    total = queries.rows("select sum(value) as s from health where event = 'timing'")[0]["s"]
    elapsed = 0.0
    if queries.has("loss"):
        elapsed = queries.rows(
            "select sum(e) as s from (select max(elapsed_s) as e from loss group by attempt)"
        )[0]["s"]
    share = (
        f" In all {total:.3g} s, {total / elapsed:.2%} of the attempts' {elapsed:.5g} s." if elapsed else ""
    )
    return [
        Chart(
            id="cost",
            title="Loopscope's own time",
            text=f"Seconds that one traced step spent in loopscope.{share}",
            spec=lines(y="s per traced step", color="series", zero=True),
            data=ChartData.of(long_rows(rows, {"value": "own time"})),
            metrics=_METRICS,
            scope=queries.scope("health").words,
            notes=_note(queries, "timing"),
        )
    ]


def _lost(queries: RunQueries) -> list[Chart]:
    """What should not be: events by step, where there is any."""
    rows = queries.rows(
        "select step, event, sum(coalesce(count, 1)) as value from health "
        "where severity <> 'info' and event <> 'alert' group by step, event order by step limit 2000"
    )
    if not rows:
        return []
    data = [
        {"step": r["step"], "series": r["event"], "value": r["value"], "low": None, "high": None}
        for r in rows
    ]
    return [
        Chart(
            id="lost",
            title="What was lost, missing or not finite",
            text="How many, by step and kind of event. A healthy run has no such event.",
            spec=lines(y="how many", color="event", zero=True, points=True, band=False, symlog=1.0),
            data=ChartData.of([{**row, "event": row.pop("series")} for row in data]),
            metrics=(("health", "event"), ("health", "count")),
            scope=queries.scope("health").words,
            notes=("The first 2,000 are drawn.",) if len(rows) == 2000 else (),
        )
    ]


def _counts(queries: RunQueries) -> Table:
    """What must be 0, said also where it is."""
    rows = []
    for table in ("router", "residual"):
        if queries.has(table):
            found = queries.rows(
                f"select coalesce(sum(nonfinite_count), 0) as bad, count(*) as n from {table} "
                f"where {queries.scope(table).where}"
            )[0]
            rows.append((f"non-finite entries, table {table}", f"{found['bad']:,}", f"{found['n']:,} rows"))
    if queries.has("loss"):
        where = queries.scope("loss").where
        found = queries.rows(f"select count(nonfinite_fields) as bad, count(*) as n from loss where {where}")[
            0
        ]
        rows.append(("steps with a non-finite loss", f"{found['bad']:,}", f"{found['n']:,} steps"))
    if queries.has("health"):
        found = queries.rows(
            "select coalesce(sum(count) filter (event = 'dropped_rows'), 0) as dropped, "
            "count(*) filter (event = 'error') as errors, count(*) as n from health"
        )[0]
        rows.append(("rows dropped", f"{found['dropped']:,}", f"{found['n']:,} health rows"))
        rows.append(("errors of loopscope itself", f"{found['errors']:,}", f"{found['n']:,} health rows"))
    note = "" if rows else "There are no rows to count in."
    return Table(
        id="counts", title="What should be 0", columns=("what", "how many", "in"), rows=rows, note=note
    )


def _size(queries: RunQueries, event: str) -> int:
    count = int(queries.rows(f"select count(distinct step) as n from health where event = '{event}'")[0]["n"])
    return max(1, -(-count // LINE_BUCKETS))


def _note(queries: RunQueries, event: str) -> tuple[str, ...]:
    size = _size(queries, event)
    return (
        (f"Thinned: buckets of {size} traces, with mean, smallest and largest of each.",) if size > 1 else ()
    )


def _events(queries: RunQueries) -> Table:
    found = []
    if queries.has("health"):
        found = queries.rows(
            "select event, severity, count(*) as n, min(step) as first, max(step) as last, "
            "arg_min(detail, step) as detail, arg_min(unrolled_pos, step) as pos from health "
            "where severity <> 'info' group by event, severity order by severity, n desc limit 50"
        )
    rows = [
        (
            row["event"], row["severity"], str(row["n"]), _span(row["first"], row["last"]),
            "" if row["pos"] is None else str(row["pos"]), _cut(row["detail"] or ""),
        )
        for row in found
    ]  # fmt: skip
    columns = ("event", "severity", "rows", "steps", "first at depth", "first detail")
    return Table(
        id="events",
        title="Events",
        columns=columns,
        rows=rows,
        note="" if rows else "No event: nothing was missing, lost or not finite.",
    )


def _problems(queries: RunQueries) -> Table:
    rows = [(p.where, _cut(p.text)) for p in queries.run.problems[:50]]
    note = "" if rows else "Every file of the run was read and its checksum is right."
    return Table(id="files", title="Files", columns=("file", "what is wrong"), rows=rows, note=note)


def _missing(queries: RunQueries) -> Table:
    """Columns that are null in every row, with the reason."""
    rows = []
    for table in ("loss", "router", "residual", "probe_loss"):
        if not queries.has(table):
            continue
        names = [c.name for c in queries.run.reader.schema(table).columns if c.name not in _KEYS]
        nulls = queries.rows(f"select {', '.join(f'count({n}) as {n}' for n in names)} from {table}")[0]
        empty = [name for name in names if nulls[name] == 0]
        rows += [(table, name, ", ".join(queries.reasons(table, name))) for name in empty]
    note = "" if rows else "Every column has values."
    return Table(
        id="missing",
        title="Columns without any value",
        columns=("table", "column", "reason"),
        rows=rows,
        note=note,
        folded=True,
    )


# Keys; and names of faults, which are null in a healthy row without anything missing.
_KEYS = frozenset(
    (
        *("run_id", "attempt", "step", "rank", "world_size", "aggregation_scope", "tokens_seen", "elapsed_s"),
        *("wall_time", "null_reasons", "block", "unrolled_pos", "loop_step", "layer_idx", "score_func"),
        *("score_space", "nonfinite_fields"),
    )
)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} – {last}"


def _cut(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " ..."
