"""Routers: the worst visits of the run, and every depth at the last traced step."""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from loopscope.analysis import Run, scope_of
from loopscope.catalog.registry import TABLES
from loopscope.catalog.table import Column
from loopscope.cli.console import make_table, titled
from loopscope.cli.sections.rows import (
    VISIT_COLUMNS,
    WORST,
    WORST_COLUMNS,
    fetch,
    gauges_line,
    label,
    missing_note,
)


def section(run: Run) -> list[RenderableType]:
    """Two tables and the gauges; a line where no step was traced, or no layer has a router."""
    router = TABLES["router"]
    every = router.shown("summary")
    names = ", ".join(dict.fromkeys(column.name for column in (*every, *WORST_COLUMNS)))
    visits = (
        f"with v as (select step, {VISIT_COLUMNS}, num_experts, top_k, null_reasons, {names} from router "
        "where {where})"
    )
    last = fetch(
        run,
        "router",
        f"{visits} select * from v where step = (select max(step) from v) order by unrolled_pos",
    )
    if not last:
        dense = fetch(run, "residual", "select step from residual where {where} limit 1")
        return [
            Text("Routers: none in the layers that were traced")
            if dense
            else Text("Routers: no step traced", style="yellow")
        ]
    of_run = fetch(
        run,
        "router",
        f"{visits}, w as (select *, row_number() over (partition by unrolled_pos order by {WORST} desc nulls last, "
        f"step) as place from v) select * from w where place = 1 order by {WORST} desc nulls last, unrolled_pos "
        "limit 5",
    )
    note = scope_of(run, "router").note
    return [
        *titled(
            f"Worst visits of the whole run, by {router.by_name[WORST].heading}{note}",
            _table(of_run, WORST_COLUMNS, at_step=True),
        ),
        Text(""),
        *titled(
            f"Every depth at step {last[0]['step']}{note}; H: entropy as a share of its maximum",
            _table(last, every),
        ),
        *missing_note(last, [column.name for column in every]),
        gauges_line(run, "router"),
    ]


def _table(found: Sequence[dict[str, Any]], columns: Sequence[Column], *, at_step: bool = False) -> Table:
    rows = [
        (
            row["unrolled_pos"],
            label(row),
            f"{row['num_experts']}/{row['top_k']}",
            *([row["step"]] if at_step else []),
            *(row[column.name] for column in columns),
        )
        for row in found
    ]
    headings = ("pos", "visit", "E/k", *(["at step"] if at_step else []), *(c.heading for c in columns))
    return make_table(headings, rows, left=["visit"], digits=3)
