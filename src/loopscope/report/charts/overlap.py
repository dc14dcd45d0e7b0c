"""Whether later loop steps choose the experts that earlier ones chose."""

from __future__ import annotations

from typing import Any

from loopscope.report.chart import Chart, ChartData, Section
from loopscope.report.queries import SERIES_BUCKETS, RunQueries
from loopscope.report.widgets import lines, matrix

_MOST_LAYERS = 24


def section(queries: RunQueries) -> Section:
    """The overlap matrix of every physical layer at the last probe, and the overlap of neighbours over training."""
    charts = [*_matrices(queries), *_neighbours(queries)]
    text = (
        "Share of the chosen experts that two loop steps of one layer have in common, token by token. "
        "Different layers are never compared: their experts are strangers."
    )
    if not charts:
        text = "No pair of loop steps of one layer was measured."
    return Section(
        id="overlap", nav="Overlap", title="Do loop steps choose the same experts?", charts=charts, text=text
    )


def _matrices(queries: RunQueries) -> list[Chart]:
    if not queries.has("probe_overlap"):
        return []
    scope = queries.scope("probe_overlap")
    rows = queries.rows(
        f"select * from probe_overlap where {scope.where} and step = (select max(step) from probe_overlap) "
        "order by layer_idx, from_loop_step, to_loop_step"
    )
    layers: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        layers.setdefault(row["layer_idx"], []).append(row)
    return [_matrix(layer, pairs, scope.words) for layer, pairs in list(layers.items())[:_MOST_LAYERS]]


def _matrix(layer: int, pairs: list[dict[str, Any]], scope: str) -> Chart:
    cells = {}
    for pair in pairs:
        a, b, overlap = pair["from_loop_step"], pair["to_loop_step"], pair["topk_overlap"]
        cells[a, b] = cells[b, a] = overlap
    steps = sorted({step for cell in cells for step in cell})
    # A loop step and itself are no pair; the diagonal stays empty.
    data = [{"a": a, "b": b, "overlap": overlap} for (a, b), overlap in sorted(cells.items()) if a != b]
    chance = pairs[0]["overlap_chance"]
    return Chart(
        id=f"overlap_layer_{layer}",
        title=f"Overlap of the loop steps' choices, layer {layer}",
        text=f"At the probe after step {pairs[0]['step']}, on {pairs[0]['corpus_name'] or 'the corpus'}. "
        f"By chance: {'unknown' if chance is None else f'{chance:.3g}'}. 1: the same experts.",
        spec=matrix(
            x="a", y="b", value="overlap", title="top-k overlap", x_title="loop step", y_title="loop step",
            domain=[0, 1], labels=len(steps) <= 8, height=max(120, min(360, 34 * len(steps))),
        ),
        data=ChartData.of(data),
        metrics=(("probe_overlap", "topk_overlap"), ("probe_overlap", "overlap_chance")),
        scope=scope,
    )  # fmt: skip


def _neighbours(queries: RunQueries) -> list[Chart]:
    if not queries.has("transition"):
        return []
    scope = queries.scope("transition")
    source = f"(select * from transition where {scope.where} and kind = 'step_boundary' and topk_overlap is not null)"
    buckets = queries.buckets("transition", SERIES_BUCKETS)
    chance = queries.rows(f"select min(overlap_chance) as low, max(overlap_chance) as high from {source}")[0]
    rows = queries.thinned(source, ["topk_overlap"], buckets.per_bucket, by=("to_layer_idx",))
    if not rows:
        return []
    data = [
        {
            "step": r["step"], "layer": r["to_layer_idx"], "value": r["topk_overlap"], "low": r["topk_overlap_min"],
            "high": r["topk_overlap_max"],
        }
        for r in rows
    ]  # fmt: skip
    bound = chance["low"] if chance["low"] == chance["high"] else None
    said = f" Dotted line: {bound:.3g}, what chance gives." if bound is not None else ""
    return [
        Chart(
            id="overlap_training",
            title="Overlap of neighbouring loop steps over training",
            text=f"Training tokens; a line per layer is the mean over its loop steps, the band their range.{said}",
            spec=lines(
                y="top-k overlap", color="layer", kind="ordinal", color_title="layer", bound=bound, zero=True
            ),
            data=ChartData.of(data),
            metrics=(("transition", "topk_overlap"), ("transition", "overlap_chance")),
            scope=scope.words,
            notes=(buckets.note,) if buckets.note else (),
        )
    ]
