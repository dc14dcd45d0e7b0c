"""The deep probe: what each pass through the loop adds, structure of the choice, growth of a disturbance."""

from typing import Any

import pyarrow.compute as pc

from loopscope.report.chart import Chart, Section
from loopscope.report.charts.structure import structure
from loopscope.report.queries import SERIES_BUCKETS, RunQueries, quoted
from loopscope.report.widgets import field, line_data, lines

# id, column, title, how to read it, unit
_READOUTS = (
    (
        "readout_loss", "loss_mean", "Loss after each loop step",
        "The loop's output after a pass goes on through the rest of the network. What a later pass does not lower is "
        "depth without use.", "nats per token",
    ),
    (
        "readout_kl", "kl_from_previous", "Change of the prediction by each loop step",
        "KL(q_(r−1) ‖ q_r). Towards 0 a pass no longer changes what is predicted.", "nats",
    ),
    (
        "readout_entropy", "entropy_mean", "Uncertainty after each loop step",
        "Entropy of the prediction. A pass that lowers it without lowering the loss makes the model sure, not right.",
        "nats",
    ),
    (
        "readout_settled", "argmax_settled", "Predictions that are settled",
        "Share of tokens whose most likely token is already that of every later pass.", "share",
    ),
)  # fmt: skip
_DISTURBANCES = (
    (
        "perturbation", "amplification", "Growth of a small disturbance",
        "At the input of the first pass; a line per layer. Falling: the loop forgets it; rising: it grows with every "
        "pass.", "amplification",
    ),
    (
        "flipped", "flipped_share", "Choices that a small disturbance changes",
        "Share of tokens with another set of experts than without it; a line per layer. Many flips by a small "
        "disturbance: the choice hangs by a hair.", "share of tokens",
    ),
)  # fmt: skip


def section(queries: RunQueries) -> Section:
    """Readouts over training; structure and disturbances, per visit."""
    charts = [*_readouts(queries), *structure(queries), *_disturbances(queries)]
    text = (
        "On the fixed corpus, at steps at which the deep probe ran."
        if charts
        else "The run has no deep probe."
    )
    return Section(id="deep", nav="Depth", title="What the depth is good for", charts=charts, text=text)


def _readouts(queries: RunQueries) -> list[Chart]:
    """What the network would predict if the loop ended after each of its passes: a line per loop step."""
    table = "probe_readout"
    if not queries.has(table):
        return []
    # One way of reading out, on one corpus: values of different ones are not comparable.
    (chosen,) = queries.rows(
        f"select readout, corpus_hash from {queries.speaking(table)} "
        "group by all order by count(*) desc, readout limit 1"
    )
    only = f"readout = {quoted(chosen['readout'])} and corpus_hash = {quoted(chosen['corpus_hash'])}"
    columns = [column for _, column, *_ in _READOUTS]
    rows, buckets = queries.thinned(queries.speaking(table, only), SERIES_BUCKETS, columns, by=("loop_step",))
    return [
        queries.chart(
            table,
            (column,),
            buckets=buckets,
            id=name,
            title=title,
            text=f"{text} Read out through: {chosen['readout']}.",
            spec=lines(
                y=unit, color="loop step", kind="ordinal", color_title="loop step", points=True,
                band=buckets.size > 1,
            ),
            data=line_data(rows, column, "loop step", rows["loop_step"], known=True),
        )
        for name, column, title, text, unit in _READOUTS
    ]  # fmt: skip


def _disturbances(queries: RunQueries) -> list[Chart]:
    """How a small disturbance of the loop's input grows with each pass: at the last deep probe, and over training."""
    columns = 'r as "loop step", l as layer, amplification, flipped_share'
    rows = queries.last_visits("probe_perturbation", columns)
    if not rows.num_rows:
        return []
    rows = rows.filter(pc.field("b") == 1)
    step = rows["step"][0] if rows.num_rows else "?"
    axis = {"values": sorted(rows["r"].unique().to_pylist()), "format": "d", "labelOverlap": True}
    spec: dict[str, Any] = {
        "color": "layer", "kind": "ordinal", "color_title": "layer", "points": True, "band": False, "zero": True,
        "x": field("loop step", title="loop step", axis=axis, scale={"nice": False}),
    }  # fmt: skip
    drawn = ["loop step", "layer", "value", "low", "high"]
    last = [
        queries.chart(
            "probe_perturbation",
            (column,),
            id=name,
            title=title,
            text=f"{text} At the probe after step {step}.",
            spec=lines(y=unit, **spec),
            data=rows.select(("loop step", "layer", column, column, column))
            .rename_columns(drawn)
            .drop_null(),
        )
        for name, column, title, text, unit in _DISTURBANCES
    ]
    return [*last, _rates(queries)]


def _rates(queries: RunQueries) -> Chart:
    """The factor per pass up to the last one: below 1 the loop forgets."""
    source = (
        f"(select * from {queries.visits('probe_perturbation')} where b = 1 and distance_rate is not null "
        "qualify r = max(r) over (partition by step, l))"
    )
    rows, buckets = queries.thinned(source, SERIES_BUCKETS, ["distance_rate"], by=("l",))
    return queries.chart(
        "probe_perturbation",
        ("distance_rate",),
        buckets=buckets,
        id="perturbation_rate",
        title="Factor per pass of a small disturbance",
        text="Geometric mean over all passes, at every deep probe; a line per layer. Below the dotted line at 1 "
        "the loop forgets a disturbance, above it the loop is unstable.",
        spec=lines(
            y="factor per pass", color="layer", kind="ordinal", color_title="layer", points=True, bound=1.0,
            band=buckets.size > 1,
        ),
        data=line_data(rows, "distance_rate", "layer", rows["l"]),
    )  # fmt: skip
