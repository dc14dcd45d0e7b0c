"""What `loopscope watch` shows of a run at one moment."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text

from loopscope.alerts import Bounds
from loopscope.analysis import Run, scope_of
from loopscope.analysis.health_findings import findings
from loopscope.analysis.liveness import liveness
from loopscope.cli.console import make_table, number, plain, titled
from loopscope.cli.sections.rows import (
    VISIT_COLUMNS,
    WORST,
    WORST_COLUMNS,
    fetch,
    gauges_line,
    label,
)

_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {"critical": "bold red", "warn": "yellow", "early": "dim"}
_POINTS = 48
_NARROW = 70
"""Columns below which a view leaves some of its own out: a number that is folded is another number."""


def view(run: Run, settings: Bounds = None, *, width: int = 100) -> Group:
    """Head, alerts, losses, the loop, worst visits, in `width` columns."""
    narrow = width < _NARROW
    parts = [
        _head(run),
        _alerts(run, settings),
        _losses(run, _points(width, 26)),
        _loop(run, _points(width, 27 if narrow else 56), narrow=narrow),
        _worst(run, narrow=narrow),
    ]
    return Group(*(line for part in parts if part for line in [*part, Text("")]))


def _points(width: int, taken: int) -> int:
    """Points of a sparkline beside columns that take `taken`."""
    return max(4, min(_POINTS, width - taken))


def sparkline(values: Sequence[float | None]) -> str:
    """One block per value between the smallest and the largest; a blank where there is none, or none that is finite.

    >>> sparkline([0, 1, None, 2])
    '▁▅ █'
    >>> sparkline([float("nan"), 1, float("inf"), 2])
    ' ▁ █'
    """
    values = [value if value is not None and math.isfinite(value) else None for value in values]
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(
        " " if v is None else _BLOCKS[int((v - low) / span * (len(_BLOCKS) - 1) + 0.5)] for v in values
    )


def _head(run: Run) -> list[RenderableType]:
    name = plain(run.manifest.run_name or run.path.name)
    last = fetch(
        run, "loss", "select step, attempt, tokens_seen, elapsed_s, wall_time from loss where {where} "
        "order by step desc limit 20"
    )  # fmt: skip
    state = liveness(run.path)
    if not last:
        return [Text(f"{name}  [{state}]  no step yet", style="bold")]
    newest, oldest = last[0], last[-1]
    line = (
        f"{name}  [{state}]  step {newest['step']}  attempt {newest['attempt']}{scope_of(run, 'loss').note}"
    )
    if newest["tokens_seen"] is not None:
        line += f"  {newest['tokens_seen']:,} tokens"
    if newest["attempt"] == oldest["attempt"] and None not in (newest["elapsed_s"], oldest["elapsed_s"]):
        seconds = newest["elapsed_s"] - oldest["elapsed_s"]
        if seconds > 0 and newest["tokens_seen"] is not None and oldest["tokens_seen"] is not None:
            line += f"  {number((newest['tokens_seen'] - oldest['tokens_seen']) / seconds, 3)} tokens/s"
    if newest["wall_time"] is not None:
        line += f"  last row {_ago((datetime.now(UTC) - newest['wall_time']).total_seconds())} ago"
    return [Text(line, style="bold")]


def _losses(run: Run, points: int) -> list[RenderableType]:
    names = ("task_loss", "total_loss", "lb_loss", "grad_norm", "lr")
    rows = fetch(
        run, "loss", f"select step, {', '.join(names)} from loss where {{where}} order by step desc limit {_POINTS * 4}"
    )[::-1]  # fmt: skip
    if not rows:
        return []
    cells = [(name, rows[-1][name], sparkline(_thin([row[name] for row in rows], points))) for name in names]
    columns = ("loss", "now", f"last {len(rows)} steps")
    return [make_table(columns, cells, left=columns[::2])]


def _loop(run: Run, points: int, *, narrow: bool) -> list[RenderableType]:
    rows = fetch(
        run, "transition", "select step, to_loop_step as r, avg(relative_delta) as delta, avg(growth) as growth, "
        "avg(state_cosine) as cosine from transition where {where} and kind = 'step_boundary' "
        f"and step in (select distinct step from transition order by step desc limit {points}) "
        "group by step, r order by step, r",
    )  # fmt: skip
    if not rows:
        return []
    delta = "delta" if narrow else "relative delta"
    names = {"delta": delta, "growth": "growth"} | ({} if narrow else {"cosine": "cosine"})
    by_step = {step: [row for row in rows if row["r"] == step] for step in sorted({row["r"] for row in rows})}
    cells = [
        (f"{step - 1} → {step}", *(of[-1][name] for name in names), sparkline([row["delta"] for row in of]))
        for step, of in by_step.items()
    ]
    columns = ["step" if narrow else "loop step", *names.values(), f"{delta} over traces"]
    table = make_table(columns, cells, left=columns[-1:])
    return [
        *titled(f"The loop, mean over its layers' own values{scope_of(run, 'transition').note}", table),
        gauges_line(run, "transition", "residual"),
    ]


def _worst(run: Run, *, narrow: bool) -> list[RenderableType]:
    columns = WORST_COLUMNS[::2] if narrow else WORST_COLUMNS
    rows = fetch(
        run, "router", f"select step, {VISIT_COLUMNS}, num_experts, {', '.join(c.name for c in columns)} from router "
        f"where {{where}} and step = (select max(step) from router) order by {WORST} desc nulls last limit 5",
    )  # fmt: skip
    if not rows:
        return []
    headings = ["visit", *(column.heading for column in columns), "of E"]
    cells = [(label(row), *(row[column.name] for column in columns), row["num_experts"]) for row in rows]
    table = make_table(headings, cells, left=("visit",))
    return [
        *titled(f"Most overloaded visits at step {rows[0]['step']}{scope_of(run, 'router').note}", table),
        gauges_line(run, "router"),
    ]


def _alerts(run: Run, bounds: Bounds) -> list[RenderableType]:
    result = findings(run, bounds)
    marks = [("over", "dim") if f.over else (f.severity, _STYLES[f.severity]) for f in result.found]
    lines = [
        Text(plain(f"{mark}: {found.title}. {found.text}"), style=style)
        for found, (mark, style) in zip(result.found, marks, strict=True)
    ]
    none = Text("none" + (f". {result.judged}" if result.state == "young" else ""), style="dim")
    return [Text("Alerts", style="bold"), *(lines or [none])]


def _thin(values: Sequence[float | None], points: int) -> list[float | None]:
    size = max(1, -(-len(values) // points))
    groups = [
        [v for v in values[i : i + size] if v is not None and math.isfinite(v)]
        for i in range(0, len(values), size)
    ]
    return [sum(group) / len(group) if group else None for group in groups]


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
