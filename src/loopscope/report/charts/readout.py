"""What the network would predict if the loop ended after each of its passes."""

from __future__ import annotations

from loopscope.report.chart import Chart
from loopscope.report.queries import SERIES_BUCKETS, RunQueries, quoted
from loopscope.report.widgets import line_data, lines

# id, column, title, how to read it, unit
_CHARTS = (
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


def readouts(queries: RunQueries) -> list[Chart]:
    """Over training, a line per loop step."""
    table = "probe_readout"
    if not queries.has(table):
        return []
    where = queries.scope(table).where
    # One way of reading out, on one corpus: values of different ones are not comparable.
    (chosen,) = queries.rows(
        f"select readout, corpus_hash from {table} where {where} group by all order by count(*) desc, readout limit 1"
    )
    where += f" and readout = {quoted(chosen['readout'])} and corpus_hash = {quoted(chosen['corpus_hash'])}"
    buckets = queries.buckets(table, SERIES_BUCKETS)
    columns = [column for _, column, *_ in _CHARTS]
    rows = queries.thinned(
        f"(select * from {table} where {where})", columns, buckets.per_bucket, by=("loop_step",)
    )
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
                band=buckets.per_bucket > 1,
            ),
            data=line_data(rows, column, "loop step", rows["loop_step"], known=True),
        )
        for name, column, title, text, unit in _CHARTS
    ]  # fmt: skip
