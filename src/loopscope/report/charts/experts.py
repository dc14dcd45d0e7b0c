"""Which experts carry the load: loop step × expert, one map per physical layer."""

from __future__ import annotations

from typing import Any

from loopscope.report.chart import Chart, ChartData, Section
from loopscope.report.queries import RunQueries
from loopscope.report.widgets import matrix

_WINDOW = 20
_MOST_LAYERS = 24


def section(queries: RunQueries) -> Section:
    """Maps over the last traces; head and tail in maps of their own."""
    if not queries.has("router"):
        return Section(
            id="experts",
            nav="Experts",
            title="Experts",
            text="Nothing was traced, so no expert's load is known.",
        )
    scope = queries.scope("router")
    rows = queries.rows(f"""
        with recent as (select distinct step from router where {scope.where} order by step desc limit {_WINDOW}),
        counts as (
            select b, r, l, expert, sum(c) as c, max(num_experts) as experts, min(step) as first, max(step) as last
            from (select b, r, l, step, num_experts, unnest(expert_count) as c,
                    unnest(range(len(expert_count))) as expert
                from {queries.visits("router")} where step in (select step from recent))
            group by b, r, l, expert)
        select *, c * experts / nullif(sum(c) over (partition by b, r, l), 0) as share
        from counts order by b, l, r, expert""")
    layers: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        # Head layers together and tail layers together: their experts may be of another number than the loop's.
        layers.setdefault((row["b"], row["l"] if row["b"] == 1 else 0), []).append(row)
    shown = dict(list(layers.items())[:_MOST_LAYERS])
    # One range for all layers, so that a shade means the same in each.
    most = max((row["share"] for row in rows if row["share"] is not None), default=1)
    charts = [
        _chart(block, layer, cells, scope.words, max(2, most)) for (block, layer), cells in shown.items()
    ]
    text = (
        "Load in units of the fair share: 1 is balanced, 2 twice its share; dark is less, bright is more. A red cross: "
        "no token at all."
    )
    if len(layers) > len(shown):
        text += f" The first {len(shown)} of {len(layers)} layers are shown."
    return Section(id="experts", nav="Experts", title="Load of the experts", charts=charts, text=text)


def _chart(block: int, layer: int, cells: list[dict[str, Any]], scope: str, most: float) -> Chart:
    name = {0: "head", 1: f"loop layer {layer}", 2: "tail"}[block]
    row_title = "loop step" if block == 1 else "layer"
    first, last = min(c["first"] for c in cells), max(c["last"] for c in cells)
    data = [
        {
            "row": c["r"] if block == 1 else c["l"], "expert": c["expert"], "share": c["share"], "tokens": c["c"],
            "dead": int(c["c"] == 0),
        }
        for c in cells
    ]  # fmt: skip
    height = max(70, min(320, 30 * len({d["row"] for d in data})))
    dead = {d["expert"] for d in data} - {d["expert"] for d in data if not d["dead"]}
    said = f" Without a token in every row: {_listed(dead)}." if dead else ""
    return Chart(
        id=f"experts_{name.replace(' ', '_')}",
        title=f"Load of the experts, {name}",
        text=f"Summed over the traces of steps {first} to {last}; {row_title} by expert.{said}",
        spec=matrix(
            x="expert", y="row", value="share", title="load / fair share", middle=1, domain=[0, most],
            cross="dead", x_title="expert", y_title=row_title, extra=("tokens",), height=height,
        ),
        data=ChartData.of(data),
        metrics=(("router", "expert_count"),),
        scope=scope,
    )  # fmt: skip


def _listed(experts: set[int]) -> str:
    named = sorted(experts)
    return ", ".join(map(str, named[:16])) + (f", ... ({len(named)} in all)" if len(named) > 16 else "")
