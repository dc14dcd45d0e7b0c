"""Several runs over each other: their headline quantities by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from loopscope.analysis import Run
from loopscope.analysis.health_findings import Findings
from loopscope.report.chart import Chart, Data, Section
from loopscope.report.kit import lines, x_step
from loopscope.report.look import SERIES_BUCKETS, Look
from loopscope.report.part import Part

Axis = Literal["step", "tokens"]

_MOST_NAME = 24
"""Signs of a run's name in a legend; names of one series differ at their ends."""
_BOUNDARY = "kind = 'step_boundary'"
_WHOLE = "stratum_kind = 'all'"
# id, title, how to read it, table, SQL over the scope's rows giving one value per step, which rows, unit, column
_QUANTITIES = (
    (
        "task_loss", "Task loss", "Cross-entropy of the training tokens, without the auxiliary losses.",
        "loss", "avg(task_loss)", "true", "nats", "task_loss",
    ),
    ("grad", "Gradient norm", "Before clipping.", "loss", "avg(grad_norm)", "true", "norm", "grad_norm"),
    (
        "entropy", "Least even visit", "Load entropy of the visit where it is lowest; 1: every expert gets its share.",
        "router", "min(load_entropy_ratio)", "true", "ratio", "load_entropy_ratio",
    ),
    (
        "maxvio", "Most overloaded expert", "MaxVio of the visit where it is largest; 0: balanced, 1: twice its share.",
        "router", "max(maxvio_count)", "true", "MaxVio", "maxvio_count",
    ),
    (
        "dead", "Experts without a token", "Within one traced step, all visits together.",
        "router", "sum(dead_experts)", "true", "experts", "dead_experts",
    ),
    (
        "growth", "Growth at the loop's end", "Norm of the state after the last pass over that before it.",
        "transition", "arg_max(growth, to_pos)", _BOUNDARY, "growth", "growth",
    ),
    (
        "delta", "Movement at the loop's end", "How far the last pass moves the state, as a share of it.",
        "transition", "arg_max(relative_delta, to_pos)", _BOUNDARY, "relative delta", "relative_delta",
    ),
    (
        "probe", "Loss on the probe corpus", "Comparable where both runs were probed on the same corpus.",
        "probe_loss", "avg(loss_mean)", _WHOLE, "nats per token", "loss_mean",
    ),
)  # fmt: skip


def comparison(runs: Sequence[Run], names: Sequence[str], by: Axis = "step") -> Part:
    """A part of its own, with a chart per quantity and a line per run, aligned by step or by tokens seen."""
    looks = [Look(run) for run in runs]
    told = unique(names)
    charts = [chart for quantity in _QUANTITIES if (chart := _chart(looks, told, by, *quantity)) is not None]
    aligned = "optimizer step" if by == "step" else "training tokens"
    section = Section(id="all", nav="All", title="Side by side", charts=charts, text=f"Aligned by {aligned}.")
    none = Findings(found=(), early=(), judged="", alerts=())
    return Part(key="c", name="Comparison", facts=[], findings=none, sections=[section], checks=[])


def unique(names: Sequence[str]) -> list[str]:
    """Names that tell runs apart, also where two have the same, and are short enough for a legend.

    >>> unique(["base-model-of-november-lr-3e-4-seed-1", "base-model-of-november-lr-3e-4-seed-2", "a", "a"])
    ['base-model-…-4-seed-1', 'base-model-…-4-seed-2', 'a (3)', 'a (4)']
    """
    short = [name if len(name) <= _MOST_NAME else f"{name[:11]}…{name[-9:]}" for name in names]
    return [name if short.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(short)]


def _chart(
    looks: Sequence[Look], names: Sequence[str], by: Axis, name: str, title: str, text: str, table: str, value: str,
    only: str, unit: str, column: str,
) -> Chart | None:  # fmt: skip
    rows, notes, scopes = [], [], []
    for look, run in zip(looks, names, strict=True):
        if not look.has(table):
            notes.append(f"{run} has no row of the table {table}.")
            rows.append(_placeholder(by, run))
            continue
        scope = look.scope(table)
        scopes.append(scope.words)
        source = (
            f"(select step, {value} as v, max(tokens_seen) as tokens from {table} "
            f"where {scope.where} and {only} group by step)"
        )
        buckets = look.buckets(table, SERIES_BUCKETS)
        found = look.thinned(source, ["v", "tokens"], buckets.per_bucket)
        found = [r for r in found if r["v"] is not None]
        placed = [r for r in found if r[by] is not None]
        if len(placed) < len(found):
            notes.append(
                f"{run}: {len(found) - len(placed)} of {len(found)} points have no number of tokens."
            )
        rows += [
            {by: r[by], "run": run, "value": r["v"], "low": r["v_min"], "high": r["v_max"]} for r in placed
        ]
        if not placed:
            rows.append(_placeholder(by, run))
        if buckets.note:
            notes.append(f"{run}: {buckets.note}")
        notes += [f"{run}: {note}" for note in look.missing(table, (column,), only)]
    if not scopes:
        return None
    return Chart(
        id=name,
        title=title,
        text=text,
        spec=lines(
            y=unit,
            color="run",
            columns=2,
            label_limit=230,
            x=x_step() if by == "step" else x_step("training tokens", "tokens"),
        ),
        data=Data.of(rows if any(row["value"] is not None for row in rows) else []),
        metrics=((table, column),),
        scope=", ".join(dict.fromkeys(scopes)),
        notes=(*notes, *(_corpora(looks, names) if table == "probe_loss" else ())),
    )


def _placeholder(by: Axis, run: str) -> dict[str, Any]:
    """A row that is not drawn: a run keeps its colour in every picture, also after one that has no value."""
    return {by: None, "run": run, "value": None, "low": None, "high": None}


def _corpora(looks: Sequence[Look], names: Sequence[str]) -> list[str]:
    """Said where runs were probed on different text."""
    known = {
        run: sorted({row["h"] for row in look.rows("select distinct corpus_hash as h from probe_loss")})
        for look, run in zip(looks, names, strict=True) if look.has("probe_loss")
    }  # fmt: skip
    if len({tuple(hashes) for hashes in known.values()}) <= 1:
        return []
    told = "; ".join(f"{run}: {', '.join(h[:12] for h in hashes)}" for run, hashes in known.items())
    return [f"Not comparable: the corpora differ ({told})."]
