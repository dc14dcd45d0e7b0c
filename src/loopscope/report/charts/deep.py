"""The deep probe: what each pass through the loop adds, structure of the choice, growth of a disturbance."""

from __future__ import annotations

from typing import Any

import altair as alt

from loopscope.report.chart import Chart, Data, Section
from loopscope.report.kit import lines, matrix
from loopscope.report.look import SERIES_BUCKETS, Look, visit_label

_READOUT = (
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
        "readout_settled", "argmax_settled", "Predictions that are settled",
        "Share of tokens whose most likely token is already that of every later pass.", "share",
    ),
)  # fmt: skip


def section(look: Look) -> Section:
    """Readouts over training; margins and disturbances of the last deep probe, per visit."""
    charts = [*_readouts(look), *_margins(look), *_disturbance(look)]
    text = "On the fixed corpus, at steps at which the deep probe ran."
    if not charts:
        text = "The run has no deep probe."
    return Section(id="deep", nav="Depth", title="What the depth is good for", charts=charts, text=text)


def _readouts(look: Look) -> list[Chart]:
    if not look.has("probe_readout"):
        return []
    scope = look.scope("probe_readout")
    # One way of reading out, on one corpus: values of different ones are not comparable.
    chosen = look.rows(
        f"select readout, corpus_hash, corpus_name from probe_readout where {scope.where} "
        "group by all order by count(*) desc, readout limit 1"
    )[0]
    where = f"{scope.where} and readout = '{_quoted(chosen['readout'])}'"
    where += f" and corpus_hash = '{_quoted(chosen['corpus_hash'])}'"
    buckets = look.buckets("probe_readout", SERIES_BUCKETS)
    rows = look.thinned(
        f"(select * from probe_readout where {where})", [name for _, name, *_ in _READOUT], buckets.per_bucket,
        by=("loop_step",),
    )  # fmt: skip
    charts = []
    for name, column, title, text, unit in _READOUT:
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
                data=Data.of(data),
                metrics=(("probe_readout", column),),
                scope=scope.words,
                notes=(*((buckets.note,) if buckets.note else ()), *look.missing("probe_readout", (column,))),
            )
        )  # fmt: skip
    return charts


def _margins(look: Look) -> list[Chart]:
    if not look.has("probe_margin"):
        return []
    scope = look.scope("probe_margin")
    rows = _last_visits(look, "probe_margin", "quantity, rho_cal, cell, calibrated, shuffle_scope")
    data = [
        {"visit": visit_label(r), "quantity": str(r["quantity"]), "rho": r["rho_cal"]}
        for r in rows if r["rho_cal"] is not None
    ]  # fmt: skip
    bounded = " Scores here are bounded, so that 1 is not what chance gives." if any(
        r["calibrated"] is False for r in rows
    ) else ""  # fmt: skip
    # As far to either side, so that a shade means the same distance above and below 1.
    furthest = max((abs(d["rho"] - 1) for d in data), default=1.0) or 1.0
    cells = ", ".join(sorted({str(r["cell"]) for r in rows if r["cell"]}))
    return [
        Chart(
            id="margin_null",
            title="Margin against a null without structure",
            text=f"Per visit at the last deep probe, shuffled within: {rows[0]['shuffle_scope']}. 1: as by chance, "
            f"above it the choice has structure.{bounded} Read as: {cells or 'not known'}.",
            spec=matrix(
                x="visit", y="quantity", value="rho", title="ρ calibrated", middle=1, x_title="visit", y_title="",
                domain=[1 - furthest, 1 + furthest],
                height=90, names=True,
            ),
            data=Data.of(data),
            metrics=(("probe_margin", "rho_cal"),),
            scope=scope.words,
            notes=look.missing("probe_margin", ("rho_cal",)),
        )
    ]  # fmt: skip


def _disturbance(look: Look) -> list[Chart]:
    if not look.has("probe_perturbation"):
        return []
    scope = look.scope("probe_perturbation")
    rows = [
        r for r in _last_visits(look, "probe_perturbation", "amplification, flipped_share") if r["b"] == 1
    ]
    data = [
        {
            "loop step": r["r"], "layer": r["l"], "value": r["amplification"], "low": r["amplification"],
            "high": r["amplification"],
        }
        for r in rows if r["amplification"] is not None
    ]  # fmt: skip
    return [
        Chart(
            id="perturbation",
            title="Growth of a small disturbance",
            text="At the input of the first pass, at the last deep probe; a line per layer. Falling: the loop "
            "forgets it; rising: it grows with every pass.",
            spec=lines(
                y="amplification", color="layer", kind="ordinal", color_title="layer", points=True, band=False,
                x=_loop_axis(),
            ),
            data=Data.of(data),
            metrics=(("probe_perturbation", "amplification"),),
            scope=scope.words,
            notes=look.missing("probe_perturbation", ("amplification",)),
        )
    ]  # fmt: skip


def _last_visits(look: Look, table: str, columns: str) -> list[dict[str, Any]]:
    visits = look.visits(table)
    return look.rows(
        f"select b, r, l, {columns} from {visits} where step = (select max(step) from {table}) order by b, r, l"
    )


def _loop_axis() -> alt.X:
    import altair as alt

    return alt.X(
        "loop step:Q",
        title="loop step",
        axis=alt.Axis(tickMinStep=1, format="d"),
        scale=alt.Scale(nice=False),
    )


def _quoted(text: str) -> str:
    return str(text).replace("'", "''")
