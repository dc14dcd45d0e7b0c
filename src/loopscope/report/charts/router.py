"""What the routers do: step × depth maps."""

from __future__ import annotations

from typing import Any

from loopscope.report.chart import Chart, Data, Section
from loopscope.report.kit import heatmap
from loopscope.report.look import HEAT_BUCKETS, Look, visit_label

# id, column, title, how to read it, which value of a bucket is drawn
_MAPS = (
    (
        "load_entropy", "load_entropy_ratio", "Evenness of the load",
        "1: every expert gets its share; 0: one expert gets everything.", "",
    ),
    (
        "maxvio", "maxvio_count", "Overload of the busiest expert",
        "0: balanced; 1: it gets twice its share. Its maximum, E/k − 1, may differ between head, loop and tail.",
        "_max",
    ),
    ("dead", "dead_experts", "Experts without a token", "Counted within one traced step.", "_max"),
    (
        "margin", "margin_p50", "Margin of the choice (median)",
        "Distance from the best to the last chosen expert's score. Near 0 the choice is arbitrary.", "",
    ),
    ("z", "z_mean", "Size of the router's logits (mean logsumexp)", "Balanced small logits give about ln E.", ""),
    (
        "token_entropy", "token_entropy_ratio", "Indecision per token",
        "1: a token's probabilities are even; near 0: the router is sure. Low is normal in a specialised router.", "",
    ),
)  # fmt: skip


def section(look: Look) -> Section:
    """One map per column."""
    if not look.has("router"):
        text = "The run has no row of the table router: it was not traced, or its layers have no router."
        return Section(id="router", nav="Routing", title="Routing", text=text)
    scope = look.scope("router")
    buckets = look.buckets("router", HEAT_BUCKETS)
    columns = [column for _, column, *_ in _MAPS]
    rows = look.thinned(look.visits("router"), columns, buckets.per_bucket, by=("b", "r", "l"))
    rows, order = with_cells(rows, look.last_step)
    thinned = (buckets.note,) if buckets.note else ()
    charts = [
        Chart(
            id=name,
            title=title,
            text=f"{text} {'Largest value of a bucket.' if which and buckets.per_bucket > 1 else ''}".strip(),
            spec=heatmap(
                y_order=order,
                value=column,
                title=column,
                last=rows[-1]["until"],
                domain=_domain(rows, column),
            ),
            data=_cells(rows, column, which),
            metrics=(("router", column),),
            scope=scope.words,
            notes=(*thinned, *look.missing("router", (column,))),
        )
        for name, column, title, text, which in _MAPS
    ]
    text = (
        "Depth runs from the top down, in the order of execution; training from left to right. A cell holds from "
        "one trace to the next. An empty cell was not measured."
    )
    return Section(
        id="router", nav="Routing", title="Routing over training and depth", charts=charts, text=text
    )


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


def _domain(rows: list[dict[str, Any]], column: str) -> list[float] | None:
    """Colours of a ratio end at its rule's bound at least, those of a count at 1; other quantities are stretched."""
    lows = [row[f"{column}_min"] for row in rows if row[column] is not None]
    highs = [row[f"{column}_max"] for row in rows if row[column] is not None]
    if not lows:
        return None
    return {
        "load_entropy_ratio": [min(0.8, *lows), 1.0],
        "maxvio_count": [0.0, max(1.0, *highs)],
        "dead_experts": [0.0, max(1.0, *highs)],
        "token_entropy_ratio": [0.0, 1.0],
    }.get(column)


def _cells(rows: list[dict[str, Any]], column: str, which: str) -> Data:
    return Data.of(
        {
            "visit": row["visit"], "step": row["step"], "until": row["until"], "step_to": row["step_to"],
            column: row[column + which], f"{column}_min": row[f"{column}_min"], f"{column}_max": row[f"{column}_max"],
        }
        for row in rows if row[column] is not None
    )  # fmt: skip
