"""Which experts carry the load: loop step × expert, one map per physical layer."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from loopscope.catalog.rows import BLOCKS
from loopscope.report.chart import Chart, Section
from loopscope.report.queries import RunQueries
from loopscope.report.widgets import matrix

_WINDOW = 20
_MOST_LAYERS = 24


def section(queries: RunQueries) -> Section:
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
    charts = [_chart(queries, block, layer, rows, most) for block, layer in layers[:_MOST_LAYERS]]
    text = (
        "Load in units of the fair share: 1 is balanced, 2 twice its share; dark is less, bright is more. A red cross: "
        "no token at all."
    )
    if len(layers) > len(charts):
        text += f" The first {len(charts)} of {len(layers)} layers are shown."
    return Section(id="experts", nav="Experts", title="Load of the experts", charts=charts, text=text)


def _chart(queries: RunQueries, block: int, layer: int, rows: pa.Table, most: float) -> Chart:
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
