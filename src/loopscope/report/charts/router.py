"""What the routers do: step × depth maps, from the first layer down to the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loopscope.catalog.column import Column, Picture
from loopscope.catalog.registry import TABLES
from loopscope.report.chart import Chart, Section
from loopscope.report.queries import HEAT_BUCKETS, RunQueries, visit_names
from loopscope.report.widgets import heatmap

# What a cell shows of its bucket.
_SIDES = {"mean": "", "smallest": "_min", "largest": "_max"}


def section(queries: RunQueries) -> Section:
    """One map per column that the catalogue has a picture of."""
    if not queries.has("router"):
        text = "The run has no row of the table router: it was not traced, or its layers have no router."
        return Section(id="router", nav="Routing", title="Routing", text=text)
    text = (
        "Depth runs from the top down, in the order of execution; training from left to right. A cell holds from "
        "one trace to the next. A grey cell is missing, and says why; an empty one was not traced."
    )
    charts = maps(queries, "router", TABLES["router"].columns)
    return Section(
        id="router", nav="Routing", title="Routing over training and depth", charts=charts, text=text
    )


def maps(queries: RunQueries, table: str, columns: Sequence[Column]) -> list[Chart]:
    """A map of each of the columns of one table that have a picture."""
    drawn = [(column.name, column.picture) for column in columns if column.picture]
    if not queries.has(table):
        return []
    names = [name for name, _ in drawn]
    rows, buckets = queries.thinned(queries.visits(table), HEAT_BUCKETS, names, by=("b", "r", "l"))
    if not rows.num_rows:
        return []
    visits = visit_names(rows)
    until = _until(rows["step"].to_numpy(), queries.last_step())
    order = [
        each[-1] for each in sorted(set(zip(*(rows[key].to_pylist() for key in "brl"), visits, strict=True)))
    ]
    place = {"visit": visits, "step": rows["step"], "until": until, "step_to": rows["step_to"]}
    return [
        queries.chart(
            table,
            (name,),
            buckets=buckets,
            id=picture.id,
            title=picture.title,
            text=picture.text + _cell(picture, thinned=buckets.size > 1),
            spec=heatmap(
                y_order=order, value=name, last=int(until[-1]), domain=_domain(rows, name, picture)
            ),
            data=_cells(queries, table, name, picture, rows, place),
        )
        for name, picture in drawn
    ]  # fmt: skip


def _until(step: Any, last: int) -> Any:
    """Where each row's cell ends: at the next bucket's first step."""
    steps, index = np.unique(step, return_inverse=True)
    width = max(1, int(steps[-1] - steps[0]) // max(1, len(steps) - 1))
    return np.append(steps[1:], max(last, steps[-1]) + width)[index]


def _cell(picture: Picture, *, thinned: bool) -> str:
    return f" A cell is the {picture.side} value of its bucket." if thinned and picture.side != "mean" else ""


def _domain(rows: pa.Table, name: str, picture: Picture) -> list[float] | None:
    """A range that means something, so that noise is not stretched over all colours."""
    known = rows.filter(rows[name].is_valid())
    if not known.num_rows or (picture.least is None and picture.most is None):
        return None
    least, most = pc.min(known[f"{name}_min"]).as_py(), pc.max(known[f"{name}_max"]).as_py()
    return [
        least if picture.least is None else min(picture.least, least),
        most if picture.most is None else max(picture.most, most),
    ]


def _cells(
    queries: RunQueries, table: str, name: str, picture: Picture, rows: pa.Table, place: dict[str, Any]
) -> pa.Table:
    """A row per cell. A cell without a value keeps its place and says why; nothing to draw gives no row."""
    missing = rows[name].is_null()
    if pc.all(missing).as_py():
        return pa.table({})
    why = ", ".join(queries.reasons(table, name)) if pc.any(missing).as_py() else ""
    return pa.table(
        {
            **place,
            name: rows[name + _SIDES[picture.side]],
            f"{name}_min": rows[f"{name}_min"],
            f"{name}_max": rows[f"{name}_max"],
            "missing": pc.if_else(missing, why, pa.scalar(None, pa.string())),
        }
    )
