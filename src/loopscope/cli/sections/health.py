"""Was everything seen, was anything lost, and what did watching cost?"""

from rich.console import RenderableType
from rich.text import Text

from loopscope.analysis import Run
from loopscope.cli.console import make_table, plain, titled
from loopscope.cli.sections.rows import fetch

_STYLES = {"critical": "red", "warn": "yellow"}
_ROUTINE = "'coverage', 'probe_coverage', 'timing', 'trace_bytes'"
_DETAIL_CHARS = 160


def section(run: Run) -> list[RenderableType]:
    """Coverage, events worth a look, what the reader could not trust, and the cost of tracing."""
    return [
        Text("Health", style="bold"),
        _coverage(run, "coverage", "traced step"),
        _coverage(run, "probe_coverage", "probe"),
        *_events(run),
        *(Text(plain(f"reader: {problem}"), style="red") for problem in run.problems),
        *_cost(run),
    ]


def _rows_of(run: Run) -> str:
    # An attempt that failed before its first loss row has no live row; its errors are what one looks for.
    newest = max((attempt.attempt for attempt in run.attempts), default=None)
    return "health" if newest in run.live else "health_all"


def _coverage(run: Run, event: str, noun: str) -> Text:
    rows = fetch(
        run,
        "health",
        "select step, min(value) as share, min(count) as seen, "
        "bool_or(severity <> 'info') as bad, any_value(detail) filter (severity <> 'info') as detail "
        f"from {_rows_of(run)} where event = '{event}' group by step order by step",
    )
    if not rows:
        return Text(f"coverage: no {noun} recorded", style="yellow")
    bad = [row for row in rows if row["bad"]]
    if not bad:
        return Text(
            f"coverage: every expected visit seen at all {len(rows)} {noun}(s), {rows[-1]['seen']} visits at the last"
        )
    text = (
        f"{len(bad)} of {len(rows)} {noun}(s) incomplete, first at step {bad[0]['step']}: {bad[0]['detail']}"
    )
    return Text(plain(f"coverage: {text}"), style="red")


def _events(run: Run) -> list[RenderableType]:
    rows = fetch(
        run,
        "health",
        "select event, severity, count(*) as rows, sum(coalesce(count, 1))::bigint as total, min(step) as "
        f"first, max(step) as last, arg_min(detail, step) as detail from {_rows_of(run)} "
        "where severity <> 'info' "
        f"and event not in ({_ROUTINE}) group by event, severity order by severity, total desc",
    )
    if not rows:
        return [Text("events: none; nothing dropped, nothing non-finite, no error")]
    cells = [
        (
            Text(plain(row["event"]), style=_STYLES.get(row["severity"], "")),
            *(row[name] for name in ("rows", "total", "first", "last")),
            _short(" ".join((row["detail"] or "").split())),
        )
        for row in rows
    ]
    columns = ["event", "rows", "count", "first", "last", "detail"]
    return titled("Events", make_table(columns, cells, left=["event", "detail"]))


def _short(text: str) -> str:
    return text if len(text) <= _DETAIL_CHARS else text[: _DETAIL_CHARS - 1] + "…"


def _cost(run: Run) -> list[Text]:
    rows = fetch(
        run,
        "health",
        "select count(distinct step) as steps, avg(value) * 1e3 as mean, max(value) * 1e3 as most "
        f"from {_rows_of(run)} where event = 'timing' having count(*) > 0",
    )
    return [
        Text(
            f"cost: {row['mean']:.1f} ms per traced step of a rank on average, at most {row['most']:.1f} ms "
            f"({row['steps']} traced steps)",
            style="dim",
        )
        for row in rows
    ]
