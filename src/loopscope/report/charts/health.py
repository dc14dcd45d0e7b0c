"""Whether the measurement itself can be trusted, and what it costs."""

from typing import Any

from loopscope.analysis.records import value
from loopscope.catalog.registry import TABLES
from loopscope.catalog.tables.keys import RUN_KEYS
from loopscope.report.chart import Chart, Section, Table
from loopscope.report.charts.loss import series
from loopscope.report.queries import LINE_BUCKETS, RunQueries
from loopscope.report.widgets import lines

_MOST_EVENTS = 2000
_MOST_ROWS = 50
_NONFINITE = "coalesce(sum(nonfinite_count), 0)"
# What must be 0: what, how many, in which table, and what its rows are called.
_COUNTS = (
    ("non-finite entries, table router", _NONFINITE, "router", "rows"),
    ("non-finite entries, table residual", _NONFINITE, "residual", "rows"),
    ("steps with a non-finite loss", "count(nonfinite_fields)", "loss", "steps"),
    ("rows dropped", "coalesce(sum(count) filter (event = 'dropped_rows'), 0)", "health", "health rows"),
    ("errors of loopscope itself", "count(*) filter (event = 'error')", "health", "health rows"),
)
# Keys; and names of faults, which are null in a healthy row without anything missing.
_KEYS = {column.name for column in RUN_KEYS} | {
    "block", "unrolled_pos", "loop_step", "layer_idx", "score_func", "score_space", "nonfinite_fields",
}  # fmt: skip


def section(queries: RunQueries) -> Section:
    """Coverage, loopscope's own time, every event that is not information, everything wrong with the files."""
    charts: list[Chart] = []
    if queries.has("health"):
        coverage = (
            "Share of the promised visits that a trace saw. Below 1 a hook is silent, or the model changed."
        )
        cost = f"Seconds that one traced step spent in loopscope.{_share(queries)}"
        charts = [
            *_event(queries, "coverage", "coverage", "seen / expected", id="coverage", title="Coverage", text=coverage),
            *_event(
                queries, "timing", "own time", "s per traced step", id="cost", title="Loopscope's own time", text=cost
            ),
            *_lost(queries),
        ]  # fmt: skip
    tables = [
        _table(
            "counts", "What should be 0", "There are no rows to count in.", ("what", "how many", "in"),
            [_count(queries, *wanted) for wanted in _COUNTS if queries.has(wanted[2])],
        ),
        _table(
            "events", "Events", "No event: nothing was missing, lost or not finite.",
            ("event", "severity", "rows", "steps", "first at depth", "first detail"), _events(queries),
        ),
        _table(
            "files", "Files", "Every file of the run was read and its checksum is right.", ("file", "what is wrong"),
            [(problem.where, _cut(problem.text)) for problem in queries.run.problems[:_MOST_ROWS]],
        ),
        _table(
            "missing", "Columns without any value", "Every column has values.", ("table", "column", "reason"),
            _missing(queries), folded=True,
        ),
    ]  # fmt: skip
    text = "" if charts else "The run has no row of the table health."
    return Section(
        id="health", nav="Health", title="Health of the measurement", charts=charts, tables=tables, text=text
    )


def _share(queries: RunQueries) -> str:
    """Loopscope's own time and its share of the attempts'."""
    total = value(queries.run, "select sum(value) from health where event = 'timing'")
    if total is None or not queries.has("loss"):
        return ""
    each = "select max(elapsed_s) as elapsed from loss group by attempt"
    elapsed = value(queries.run, f"select sum(elapsed) from ({each})")
    return (
        f" In all {total:.3g} s, {total / elapsed:.2%} of the attempts' {elapsed:.5g} s." if elapsed else ""
    )


def _event(queries: RunQueries, event: str, name: str, y: str, **words: str) -> list[Chart]:
    """The value of one kind of event over training; no chart where there is none."""
    source = f"(select * from health where event = '{event}')"
    rows, buckets = queries.thinned(source, LINE_BUCKETS, ["value"])
    spec, data = lines(y=y, color="series", zero=True), series(rows, {"value": name})
    found = queries.chart(
        "health", ("event", "value"), buckets=buckets, missing=(), spec=spec, data=data, **words
    )
    return [found] if rows.num_rows else []


def _lost(queries: RunQueries) -> list[Chart]:
    """What should not be: events by step, where there is any."""
    rows = queries.table(
        "select step, event, sum(coalesce(count, 1)) as value, null as low, null as high from health "
        f"where severity <> 'info' and event <> 'alert' group by step, event order by step limit {_MOST_EVENTS}"
    )
    found = queries.chart(
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
    return [found] if rows.num_rows else []


def _count(queries: RunQueries, what: str, count: str, table: str, unit: str) -> tuple[str, ...]:
    where = "true" if table == "health" else queries.scope(table).where
    (found,) = queries.rows(f"select {count} as bad, count(*) as n from {table} where {where}")
    return what, f"{found['bad']:,}", f"{found['n']:,} {unit}"


def _events(queries: RunQueries) -> list[tuple[str, ...]]:
    if not queries.has("health"):
        return []
    found = queries.table(
        "select event, severity, count(*)::text, min(step) || if(max(step) > min(step), ' – ' || max(step), ''), "
        "coalesce(arg_min(unrolled_pos, step)::text, ''), coalesce(arg_min(detail, step), '') from health "
        "where severity <> 'info' group by event, severity "
        f"order by severity, count(*) desc limit {_MOST_ROWS}"
    )
    rows = zip(*(column.to_pylist() for column in found.columns), strict=True)
    return [(*row[:-1], _cut(row[-1])) for row in rows]


def _missing(queries: RunQueries) -> list[tuple[str, ...]]:
    """Columns that are null in every row, with the reason."""
    rows: list[tuple[str, ...]] = []
    for table in ("loss", "router", "residual", "probe_loss"):
        names = [name for name in TABLES[table].names if name not in _KEYS] if queries.has(table) else []
        # Most columns have a value in the first rows; the others are looked at in all of them.
        for source in (f"(from {table} limit 1000)", table):
            counts = ", ".join(f"count({name}) as {name}" for name in names)
            found = queries.rows(f"select {counts} from {source}")[0] if names else {}
            names = [name for name in names if not found[name]]
        rows += [(table, name, ", ".join(queries.reasons(table, name))) for name in names]
    return rows


def _table(
    name: str, title: str, otherwise: str, columns: tuple[str, ...], rows: list[Any], *, folded: bool = False
) -> Table:
    """A table, or a note where it has no row."""
    note = "" if rows else otherwise
    return Table(id=name, title=title, columns=columns, rows=rows, note=note, folded=folded)


def _cut(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " ..."
