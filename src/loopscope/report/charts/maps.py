"""Step × depth maps: one column of a table of visits over training, from the first layer down to the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loopscope.report.chart import Chart, ChartData
from loopscope.report.queries import HEAT_BUCKETS, RunQueries, visit_label
from loopscope.report.widgets import heatmap

# What a cell shows of its bucket: the side on which something would be wrong, else the mean.
_SIDES = {"mean": "", "smallest": "_min", "largest": "_max"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """One map."""

    id: str
    column: str
    title: str
    text: str
    """How to read it."""
    cell: Literal["mean", "smallest", "largest"] = "mean"
    """What is drawn of a bucket."""
    least: float | None = None
    """The colours begin here, or lower where values do; None: at the smallest value."""
    most: float | None = None
    """The colours end here, or higher where values do; None: at the largest value."""


def maps(queries: RunQueries, table: str, wanted: Sequence[Map], *, where: str = "true") -> list[Chart]:
    """The maps of one table; `where` chooses among the scope's rows."""
    scope = queries.scope(table)
    buckets = queries.buckets(table, HEAT_BUCKETS)
    source = f"(select * from {queries.visits(table)} where {where})"
    rows = queries.thinned(source, [m.column for m in wanted], buckets.per_bucket, by=("b", "r", "l"))
    if not rows:
        return []
    rows, order = with_cells(rows, queries.last_step)
    thinned = (buckets.note,) if buckets.note else ()
    return [
        Chart(
            id=each.id,
            title=each.title,
            text=_text(each, thinned=bool(thinned)),
            spec=heatmap(
                y_order=order, value=each.column, title=each.column, last=rows[-1]["until"],
                domain=_domain(rows, each),
            ),
            data=_cells(rows, each, ", ".join(queries.reasons(table, each.column))),
            metrics=((table, each.column),),
            scope=scope.words,
            notes=(*thinned, *queries.missing(table, (each.column,))),
        )
        for each in wanted
    ]  # fmt: skip


def with_cells(rows: list[dict[str, Any]], last: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows with `visit` and `until` (where the next bucket begins), and the visits in the order of depth."""
    steps = sorted({row["step"] for row in rows})
    width = max(1, (steps[-1] - steps[0]) // max(1, len(steps) - 1)) if len(steps) > 1 else 1
    ends = dict(zip(steps, [*steps[1:], max(last, steps[-1]) + width], strict=True)) if steps else {}
    visits: dict[tuple[int, int, int], str] = {}
    for row in rows:
        row["visit"], row["until"] = visit_label(row), ends[row["step"]]
        visits[row["b"], row["r"], row["l"]] = row["visit"]
    return rows, [visits[key] for key in sorted(visits)]


def _text(each: Map, *, thinned: bool) -> str:
    said = f" A cell is the {each.cell} value of its bucket." if thinned and each.cell != "mean" else ""
    return each.text + said


def _domain(rows: list[dict[str, Any]], each: Map) -> list[float] | None:
    """A range that means something, so that noise is not stretched over all colours."""
    lows = [row[f"{each.column}_min"] for row in rows if row[each.column] is not None]
    highs = [row[f"{each.column}_max"] for row in rows if row[each.column] is not None]
    if not lows or (each.least is None and each.most is None):
        return None
    return [
        min(lows) if each.least is None else min(each.least, *lows),
        max(highs) if each.most is None else max(each.most, *highs),
    ]


def _cells(rows: list[dict[str, Any]], each: Map, why: str) -> ChartData:
    """A row per cell. A cell without a value keeps its place and says why; nothing to draw gives no row."""
    column = each.column
    if all(row[column] is None for row in rows):
        return ChartData.of([])
    return ChartData.of(
        {
            "visit": row["visit"], "step": row["step"], "until": row["until"], "step_to": row["step_to"],
            column: row[column + _SIDES[each.cell]], f"{column}_min": row[f"{column}_min"],
            f"{column}_max": row[f"{column}_max"], "missing": why if row[column] is None else None,
        }
        for row in rows
    )  # fmt: skip
