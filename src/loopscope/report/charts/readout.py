"""What the network would predict if the loop ended after each of its passes."""

from __future__ import annotations

from loopscope.report.chart import Chart, ChartData
from loopscope.report.queries import SERIES_BUCKETS, RunQueries, quoted
from loopscope.report.widgets import lines

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
    if not queries.has("probe_readout"):
        return []
    scope = queries.scope("probe_readout")
    # One way of reading out, on one corpus: values of different ones are not comparable.
    chosen = queries.rows(
        f"select readout, corpus_hash, corpus_name from probe_readout where {scope.where} "
        "group by all order by count(*) desc, readout limit 1"
    )[0]
    where = f"{scope.where} and readout = {quoted(chosen['readout'])} and corpus_hash = {quoted(chosen['corpus_hash'])}"
    buckets = queries.buckets("probe_readout", SERIES_BUCKETS)
    rows = queries.thinned(
        f"(select * from probe_readout where {where})", [name for _, name, *_ in _CHARTS], buckets.per_bucket,
        by=("loop_step",),
    )  # fmt: skip
    charts = []
    for name, column, title, text, unit in _CHARTS:
        data = [
            {
                "step": r["step"], "loop step": r["loop_step"], "value": r[column], "low": r[f"{column}_min"],
                "high": r[f"{column}_max"],
            }
            for r in rows if r[column] is not None
        ]  # fmt: skip
        charts.append(
            Chart(
                id=name,
                title=title,
                text=f"{text} Read out through: {chosen['readout']}.",
                spec=lines(
                    y=unit, color="loop step", kind="ordinal", color_title="loop step", points=True,
                    band=buckets.per_bucket > 1,
                ),
                data=ChartData.of(data),
                metrics=(("probe_readout", column),),
                scope=scope.words,
                notes=(*((buckets.note,) if buckets.note else ()), *queries.missing("probe_readout", (column,))),
            )
        )  # fmt: skip
    return charts
