"""Whether later loop steps choose the experts that earlier ones chose."""

import pyarrow as pa
import pyarrow.compute as pc

from loopscope.report.chart import Chart, Section
from loopscope.report.queries import SERIES_BUCKETS, RunQueries
from loopscope.report.widgets import line_data, lines, matrix

_MOST_LAYERS = 24
_TEXT = (
    "Share of the chosen experts that two loop steps of one layer have in common, token by token. "
    "Different layers are never compared: expert 3 of one layer is not expert 3 of another."
)
_METRICS = ("topk_overlap", "overlap_chance")


def section(queries: RunQueries) -> Section:
    """The overlap matrix of every physical layer at the last probe, and the overlap of neighbours over training."""
    charts = [*_matrices(queries), *_neighbours(queries)]
    text = _TEXT if charts else "No pair of loop steps of one layer was measured."
    return Section(
        id="overlap", nav="Overlap", title="Do loop steps choose the same experts?", charts=charts, text=text
    )


def _matrices(queries: RunQueries) -> list[Chart]:
    if not queries.has("probe_overlap"):
        return []
    # A pair counts in both directions. A loop step and itself are no pair; the diagonal stays empty.
    rows = queries.table(f"""
        with pairs as (
            select step, corpus_name, layer_idx, from_loop_step as a, to_loop_step as b, topk_overlap as overlap,
                overlap_chance
            from probe_overlap where {queries.scope("probe_overlap").where}
                and step = (select max(step) from probe_overlap) and a <> b)
        select * from pairs union all select * replace (b as a, a as b) from pairs order by layer_idx, a, b""")
    layers = sorted(rows["layer_idx"].unique().to_pylist())[:_MOST_LAYERS]
    return [_matrix(queries, layer, rows.filter(pc.field("layer_idx") == layer)) for layer in layers]


def _matrix(queries: RunQueries, layer: int, pairs: pa.Table) -> Chart:
    steps = len(pairs["a"].unique())
    chance, corpus = pairs["overlap_chance"][0].as_py(), pairs["corpus_name"][0].as_py()
    return queries.chart(
        "probe_overlap",
        _METRICS,
        missing=(),
        id=f"overlap_layer_{layer}",
        title=f"Overlap of the loop steps' choices, layer {layer}",
        text=f"At the probe after step {pairs['step'][0]}, on {corpus or 'the corpus'}. "
        f"By chance: {'unknown' if chance is None else f'{chance:.3g}'}. 1: the same experts.",
        spec=matrix(
            x="a", y="b", value="overlap", title="top-k overlap", x_title="loop step", y_title="loop step",
            domain=[0, 1], labels=steps <= 8, height=max(120, min(360, 34 * steps)),
        ),
        data=pairs.select(("a", "b", "overlap")),
    )  # fmt: skip


def _neighbours(queries: RunQueries) -> list[Chart]:
    if not queries.has("transition"):
        return []
    source = queries.speaking("transition", "kind = 'step_boundary' and topk_overlap is not null")
    rows, buckets = queries.thinned(source, SERIES_BUCKETS, ["topk_overlap"], by=("to_layer_idx",))
    if not rows.num_rows:
        return []
    (chance,) = queries.rows(f"select min(overlap_chance) as low, max(overlap_chance) as high from {source}")
    bound = chance["low"] if chance["low"] == chance["high"] else None
    said = f" Dotted line: {bound:.3g}, what chance gives." if bound is not None else ""
    return [
        queries.chart(
            "transition",
            _METRICS,
            buckets=buckets,
            missing=(),
            id="overlap_training",
            title="Overlap of neighbouring loop steps over training",
            text=f"Training tokens; a line per layer is the mean over its loop steps, the band their range.{said}",
            spec=lines(
                y="top-k overlap", color="layer", kind="ordinal", color_title="layer", bound=bound, zero=True
            ),
            data=line_data(rows, "topk_overlap", "layer", rows["to_layer_idx"]),
        )
    ]
