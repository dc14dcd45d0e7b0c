"""Routers: the worst visits of the run, and every depth at the last traced step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from loopscope.cli.console import MISSING, make_table, titled
from loopscope.cli.sections.rows import Row, cell, missing_note, records, scope_filter

if TYPE_CHECKING:
    from loopscope.analysis import Run

_WORST = 5
# Means over tokens are averaged over ranks; load is not a mean, so its worst rank is shown.
_VALUES = (
    "min(load_entropy_ratio) as load_entropy_ratio, max(maxvio_count) as maxvio_count, "
    "max(dead_experts) as dead_experts, avg(margin_mean) as margin_mean, "
    "avg(token_entropy_ratio) as token_entropy_ratio, avg(z_mean) as z_mean, "
    "any_value(null_reasons) as null_reasons, count(*) as ranks"
)
_KEYS = "step, unrolled_pos, block, loop_step, layer_idx, num_experts, top_k"


def section(run: Run) -> list[RenderableType]:
    """Two tables; a line where no step was traced."""
    where = scope_filter(run, "router")
    per_visit = f"select {_KEYS}, {_VALUES} from router where {where} group by all"
    last = records(
        run,
        "router",
        f"with v as ({per_visit}) select * from v where step = (select max(step) from v) order by "
        "unrolled_pos",
    )
    if not last:
        return [Text("Routers: no step traced", style="yellow")]
    worst = records(
        run,
        "router",
        f"with v as ({per_visit}), w as (select *, row_number() over "
        "(partition by unrolled_pos order by maxvio_count desc nulls last, step) as place from v) "
        f"select * from w where place = 1 order by maxvio_count desc nulls last, unrolled_pos limit {_WORST}",
    )
    ranks = last[0]["ranks"]
    note = f", worst of {ranks} ranks" if ranks > 1 else ""
    return [*_worst_table(worst, note), *_depth_table(last, note)]


def place(row: Row) -> list[str]:
    """Cells that name a visit: depth, block, loop step and layer, E and k."""
    inside = row["loop_step"] is not None
    return [
        str(row["unrolled_pos"]),
        str(row["block"]),
        str(row["loop_step"]) if inside else MISSING,
        str(row["layer_idx"]) if inside else MISSING,
        f"{row['num_experts']}/{row['top_k']}",
    ]


_PLACE = ["pos", "block", "loop step", "layer", "E/k"]


def _worst_table(rows: list[dict[str, object]], note: str) -> list[RenderableType]:
    columns = ["maxvio_count", "load_entropy_ratio", "dead_experts"]
    table = make_table(
        [*_PLACE, "at step", "MaxVio", "load H", "dead"],
        left=["block"],
    )
    for row in rows:
        table.add_row(*place(row), str(row["step"]), *(_value(row, name) for name in columns))
    return [*titled(f"Worst visits of the whole run, by MaxVio{note}", table), Text("")]


def _depth_table(rows: list[dict[str, object]], note: str) -> list[RenderableType]:
    columns = [
        "load_entropy_ratio",
        "maxvio_count",
        "dead_experts",
        "token_entropy_ratio",
        "margin_mean",
        "z_mean",
    ]
    table = make_table(
        [*_PLACE, "load H", "MaxVio", "dead", "token H", "margin", "z"],
        left=["block"],
    )
    for row in rows:
        table.add_row(*place(row), *(_value(row, name) for name in columns))
    missing = missing_note(rows, columns)
    title = f"Every depth at step {rows[0]['step']}{note}; H: entropy as a share of its maximum"
    return [*titled(title, table), *([missing] if missing else [])]


def _value(row: Row, name: str) -> str:
    return cell(row[name], 3)
