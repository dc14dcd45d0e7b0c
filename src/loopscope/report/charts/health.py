"""Whether the measurement itself can be trusted, and what it costs."""

from __future__ import annotations

from typing import Any

from loopscope.analysis.records import value
from loopscope.catalog.registry import TABLES
from loopscope.catalog.tables.keys import RUN_KEYS
from loopscope.report.chart import Chart, Section, Table
from loopscope.report.charts.loss import series
from loopscope.report.queries import LINE_BUCKETS, Buckets, RunQueries
from loopscope.report.widgets import lines

_MOST_EVENTS = 2000
_MOST_ROWS = 50
# Keys; and names of faults, which are null in a healthy row without anything missing.
_KEYS = {column.name for column in RUN_KEYS} | {
    "block", "unrolled_pos", "loop_step", "layer_idx", "score_func", "score_space", "nonfinite_fields",
}  # fmt: skip


def section(queries: RunQueries) -> Section:
    """Coverage, loopscope's own time, every event that is not information, everything wrong with the files."""
    charts = [*_coverage(queries), *_cost(queries), *_lost(queries)] if queries.has("health") else []
    tables = [_counts(queries), _events(queries), _problems(queries), _missing(queries)]
    text = "" if charts else "The run has no row of the table health."
    return Section(
        id="health", nav="Health", title="Health of the measurement", charts=charts, tables=tables, text=text
    )


def _coverage(queries: RunQueries) -> list[Chart]:
    text = "Share of the promised visits that a trace saw. Below 1 a hook is silent, or the model changed."
    return _events_chart(
        queries, "coverage", "coverage", id="coverage", title="Coverage", text=text, y="seen / expected"
    )


def _cost(queries: RunQueries) -> list[Chart]:
    text = "Seconds that one traced step spent in loopscope."
    total = value(queries.run, "select sum(value) from health where event = 'timing'")
    if total is not None and queries.has("loss"):
        each = "select max(elapsed_s) as elapsed from loss group by attempt"
        elapsed = value(queries.run, f"select sum(elapsed) from ({each})")
        if elapsed:
            text += f" In all {total:.3g} s, {total / elapsed:.2%} of the attempts' {elapsed:.5g} s."
    return _events_chart(
        queries, "timing", "own time", id="cost", title="Loopscope's own time", text=text, y="s per traced step"
    )  # fmt: skip


def _events_chart(queries: RunQueries, event: str, name: str, *, y: str, **words: str) -> list[Chart]:
    """The value of one kind of event over training; no chart where there is none."""
    source = f"(select * from health where event = '{event}')"
    buckets = Buckets(
        steps=value(queries.run, f"select count(distinct step) from {source}"), limit=LINE_BUCKETS
    )
    if not buckets.steps:
        return []
    rows = queries.thinned(source, ["value"], buckets.per_bucket)
    return [
        queries.chart(
            "health",
            ("event", "value"),
            buckets=buckets,
            missing=(),
            spec=lines(y=y, color="series", zero=True),
            data=series(rows, {"value": name}),
            **words,
        )
    ]


def _lost(queries: RunQueries) -> list[Chart]:
    """What should not be: events by step, where there is any."""
    rows = queries.table(
        "select step, event, sum(coalesce(count, 1)) as value, null as low, null as high from health "
        f"where severity <> 'info' and event <> 'alert' group by step, event order by step limit {_MOST_EVENTS}"
    )
    if not rows.num_rows:
        return []
    return [
        queries.chart(
            "health",
            ("event", "count"),
            missing=(),
            notes=(f"The first {_MOST_EVENTS:,} are drawn.",) if rows.num_rows == _MOST_EVENTS else (),
            id="lost",
            title="What was lost, missing or not finite",
            text="How many, by step and kind of event. A healthy run has no such event.",
            spec=lines(y="how many", color="event", zero=True, points=True, band=False, symlog=1.0),
            data=rows,
        )
    ]


def _counts(queries: RunQueries) -> Table:
    """What must be 0, said also where it is."""
    nonfinite = "coalesce(sum(nonfinite_count), 0)"
    # What, how many, of which table's rows, and what these are called.
    wanted = (
        ("non-finite entries, table router", nonfinite, "router", "rows"),
        ("non-finite entries, table residual", nonfinite, "residual", "rows"),
        ("steps with a non-finite loss", "count(nonfinite_fields)", "loss", "steps"),
        ("rows dropped", "coalesce(sum(count) filter (event = 'dropped_rows'), 0)", "health", "health rows"),
        ("errors of loopscope itself", "count(*) filter (event = 'error')", "health", "health rows"),
    )
    rows = []
    for what, count, table, unit in wanted:
        if queries.has(table):
            where = "true" if table == "health" else queries.scope(table).where
            (found,) = queries.rows(f"select {count} as bad, count(*) as n from {table} where {where}")
            rows.append((what, f"{found['bad']:,}", f"{found['n']:,} {unit}"))
    return _table(
        "counts", "What should be 0", ("what", "how many", "in"), rows, "There are no rows to count in."
    )


def _events(queries: RunQueries) -> Table:
    found = []
    if queries.has("health"):
        found = queries.rows(
            "select event, severity, count(*) as n, min(step) as first, max(step) as last, "
            "arg_min(detail, step) as detail, arg_min(unrolled_pos, step) as pos from health "
            f"where severity <> 'info' group by event, severity order by severity, n desc limit {_MOST_ROWS}"
        )
    rows = [
        (
            row["event"], row["severity"], str(row["n"]),
            str(row["first"]) if row["first"] == row["last"] else f"{row['first']} – {row['last']}",
            "" if row["pos"] is None else str(row["pos"]), _cut(row["detail"] or ""),
        )
        for row in found
    ]  # fmt: skip
    columns = ("event", "severity", "rows", "steps", "first at depth", "first detail")
    return _table("events", "Events", columns, rows, "No event: nothing was missing, lost or not finite.")


def _problems(queries: RunQueries) -> Table:
    rows = [(problem.where, _cut(problem.text)) for problem in queries.run.problems[:_MOST_ROWS]]
    note = "Every file of the run was read and its checksum is right."
    return _table("files", "Files", ("file", "what is wrong"), rows, note)


def _missing(queries: RunQueries) -> Table:
    """Columns that are null in every row, with the reason."""
    rows = []
    for table in ("loss", "router", "residual", "probe_loss"):
        if not queries.has(table):
            continue
        names = [name for name in TABLES[table].names if name not in _KEYS]
        # Most columns have a value in the first rows; the others are looked at in all of them.
        for source in (f"(from {table} limit 1000)", table):
            counts = ", ".join(f"count({name}) as {name}" for name in names)
            (found,) = queries.rows(f"select {counts} from {source}") if names else [{}]
            names = [name for name in names if not found[name]]
        rows += [(table, name, ", ".join(queries.reasons(table, name))) for name in names]
    columns = ("table", "column", "reason")
    return _table(
        "missing", "Columns without any value", columns, rows, "Every column has values.", folded=True
    )


def _table(
    name: str, title: str, columns: tuple[str, ...], rows: list[Any], otherwise: str, *, folded: bool = False
) -> Table:
    """A table, or a note where it has no row."""
    note = "" if rows else otherwise
    return Table(id=name, title=title, columns=columns, rows=rows, note=note, folded=folded)


def _cut(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " ..."
