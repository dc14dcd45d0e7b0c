"""What the routers do: maps over training and depth, and which experts carry the load."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loopscope.catalog.registry import TABLES
from loopscope.catalog.rows import BLOCKS
from loopscope.catalog.table import Column, Picture
from loopscope.report.chart import Chart, Section
from loopscope.report.queries import HEAT_BUCKETS, RunQueries, visit_names
from loopscope.report.widgets import heatmap, matrix

_WINDOW = 20
_MOST_LAYERS = 24
# What a cell shows of its bucket.
_SIDE = " A cell is the {} value of its bucket."
_SIDES = {"mean": "", "smallest": "_min", "largest": "_max"}


def section(queries: RunQueries) -> Section:
    """One map per column that the catalogue has a picture of."""
    if not queries.has("router"):
        text = (
            "No layer that was traced has a router."
            if queries.has("residual")
            else "The run has no row of the table router: it was not traced."
        )
        return Section(id="router", nav="Routing", title="Routing", text=text)
    text = (
        "Depth runs from the top down, in the order of execution; training from left to right. A cell holds from "
        "one trace to the next. A grey cell is missing, and says why; an empty one was not traced."
    )
    charts = maps(queries, "router", TABLES["router"].columns)
    return Section(
        id="router", nav="Routing", title="Routing over training and depth", charts=charts, text=text
    )


def experts(queries: RunQueries) -> Section:
    """Maps over the last traces; head and tail in maps of their own."""
    if not queries.has("router"):
        text = "Nothing was traced, so no expert's load is known."
        return Section(id="experts", nav="Experts", title="Experts", text=text)
    where = queries.scope("router").where
    # Head layers together and tail layers together: their experts may be of another number than the loop's.
    rows = queries.table(f"""
        with recent as (select distinct step from router where {where} order by step desc limit {_WINDOW}),
        counts as (
            select b, r, l, expert, sum(c) as tokens, max(num_experts) as experts, min(step) as first, max(step) as last
            from (select b, r, l, step, num_experts, unnest(expert_count) as c,
                    unnest(range(len(expert_count))) as expert
                from {queries.visits("router")} where step in (select step from recent))
            group by b, r, l, expert)
        select b, case when b = 1 then l else 0 end as layer, case when b = 1 then r else l end as row, expert,
            tokens * experts / nullif(sum(tokens) over (partition by b, r, l), 0) as share, tokens,
            (tokens = 0)::int as dead, first, last
        from counts order by b, l, r, expert""")
    layers = list(dict.fromkeys(zip(rows["b"].to_pylist(), rows["layer"].to_pylist(), strict=True)))
    # One range for all layers, so that a shade means the same in each.
    most = max(2, pc.max(rows["share"]).as_py() or 1)
    charts = [_load(queries, block, layer, rows, most) for block, layer in layers[:_MOST_LAYERS]]
    text = (
        "Load in units of the fair share: 1 is balanced, 2 twice its share; dark is less, bright is more. A red cross: "
        "no token at all."
    )
    if len(layers) > len(charts):
        text += f" The first {len(charts)} of {len(layers)} layers are shown."
    return Section(id="experts", nav="Experts", title="Load of the experts", charts=charts, text=text)


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
            text=picture.text + (_SIDE.format(picture.side) if buckets.size > 1 and picture.side != "mean" else ""),
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


def _load(queries: RunQueries, block: int, layer: int, rows: pa.Table, most: float) -> Chart:
    cells = rows.filter((pc.field("b") == block) & (pc.field("layer") == layer))
    in_loop = BLOCKS[block] == "loop"
    name, row_title = (f"loop layer {layer}", "loop step") if in_loop else (BLOCKS[block], "layer")
    used = cells.filter(pc.field("tokens") > 0)["expert"]
    dead = sorted(set(cells["expert"].to_pylist()) - set(used.to_pylist()))
    said = f" Without a token in every row: {_listed(dead)}." if dead else ""
    first, last = pc.min(cells["first"]).as_py(), pc.max(cells["last"]).as_py()
    return queries.chart(
        "router",
        ("expert_count",),
        missing=(),
        id=f"experts_{name.replace(' ', '_')}",
        title=f"Load of the experts, {name}",
        text=f"Summed over the traces of steps {first} to {last}; {row_title} by expert.{said}",
        spec=matrix(
            x="expert", y="row", value="share", title="load / fair share", middle=1, domain=[0, most],
            cross="dead", x_title="expert", y_title=row_title, extra=("tokens",),
            height=max(70, min(320, 30 * len(cells["row"].unique()))),
        ),
        data=cells.select(("row", "expert", "share", "tokens", "dead")),
    )  # fmt: skip


def _listed(experts: list[int]) -> str:
    return ", ".join(map(str, experts[:16])) + (f", ... ({len(experts)} in all)" if len(experts) > 16 else "")
