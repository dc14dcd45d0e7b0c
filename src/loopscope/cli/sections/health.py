"""Was everything seen, was anything lost, and what did watching cost?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from loopscope.cli.console import make_table, plain, titled
from loopscope.cli.sections.rows import fetch

if TYPE_CHECKING:
    from loopscope.analysis import Run

_STYLES = {"critical": "red", "warn": "yellow"}
_ROUTINE = ("coverage", "probe_coverage", "timing", "trace_bytes")
_DETAIL_CHARS = 160


def section(run: Run) -> list[RenderableType]:
    """Coverage, events worth a look, what the reader could not trust, and the cost of tracing."""
    parts: list[RenderableType] = [Text("Health", style="bold")]
    parts += _coverage(run, "coverage", "traced step")
    parts += _coverage(run, "probe_coverage", "probe")
    parts += _events(run)
    parts += [Text(plain(f"reader: {problem}"), style="red") for problem in run.problems]
    parts += _cost(run)
    return parts


def _rows_of(run: Run) -> str:
    # An attempt that failed before its first loss row has no live row; its errors are what one looks for.
    newest = max((attempt.attempt for attempt in run.attempts), default=None)
    return "health" if newest in run.live else "health_all"


def _coverage(run: Run, event: str, noun: str) -> list[RenderableType]:
    rows = fetch(
        run,
        "health",
        "select step, min(value) as share, min(count) as seen, "
        "bool_or(severity <> 'info') as bad, any_value(detail) filter (severity <> 'info') as detail "
        f"from {_rows_of(run)} where event = '{event}' group by step order by step",
    )
    if not rows:
        return [Text(f"coverage: no {noun} recorded", style="yellow")]
    bad = [row for row in rows if row["bad"]]
    if not bad:
        seen = rows[-1]["seen"]
        return [
            Text(
                f"coverage: every expected visit seen at all {len(rows)} {noun}(s), {seen} visits at the last"
            )
        ]
    first = bad[0]
    text = f"coverage: {len(bad)} of {len(rows)} {noun}(s) incomplete, first at step {first['step']}: {first['detail']}"
    return [Text(plain(text), style="red")]


def _events(run: Run) -> list[RenderableType]:
    routine = ", ".join(f"'{name}'" for name in _ROUTINE)
    rows = fetch(
        run,
        "health",
        "select event, severity, count(*) as rows, sum(coalesce(count, 1))::bigint as total, min(step) as "
        f"first, max(step) as last, arg_min(detail, step) as detail from {_rows_of(run)} "
        "where severity <> 'info' "
        f"and event not in ({routine}) group by event, severity order by severity, total desc",
    )
    if not rows:
        return [Text("events: none; nothing dropped, nothing non-finite, no error")]
    table = make_table(["event", "rows", "count", "first", "last", "detail"], left=["event", "detail"])
    for row in rows:
        table.add_row(
            Text(row["event"], style=_STYLES.get(row["severity"], "")),
            str(row["rows"]),
            str(row["total"]),
            str(row["first"]),
            str(row["last"]),
            Text(plain(_short(row["detail"]))),
        )
    return titled("Events", table)


def _short(detail: str | None) -> str:
    text = " ".join((detail or "").split())
    return text if len(text) <= _DETAIL_CHARS else text[: _DETAIL_CHARS - 1] + "…"


def _cost(run: Run) -> list[RenderableType]:
    rows: list[dict[str, Any]] = fetch(
        run,
        "health",
        "select count(distinct step) as steps, avg(value) as mean, max(value) as most "
        f"from {_rows_of(run)} where event = 'timing'",
    )
    if not rows or not rows[0]["steps"]:
        return []
    row = rows[0]
    return [
        Text(
            f"cost: {row['mean'] * 1e3:.1f} ms per traced step of a rank on average, at most "
            f"{row['most'] * 1e3:.1f} ms ({row['steps']} traced steps)",
            style="dim",
        )
    ]
