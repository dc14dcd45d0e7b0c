"""Several runs over each other: their headline quantities by step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from loopscope.analysis import Run
from loopscope.analysis.gauges import gauge_columns
from loopscope.analysis.health_findings import Findings
from loopscope.catalog.gauge import Gauge, How, evaluate_by_step
from loopscope.catalog.registry import GAUGES
from loopscope.report.chart import Chart, Section
from loopscope.report.queries import SERIES_BUCKETS, Buckets, RunQueries, buckets
from loopscope.report.run_page import RunPage
from loopscope.report.widgets import lines, x_step

Axis = Literal["step", "tokens"]

_MOST_NAME = 24
"""Signs of a run's name in a legend; names of one series differ at their ends."""


def comparison(runs: Sequence[Run], names: Sequence[str], by: Axis = "step") -> RunPage:
    """A page of its own, with a chart per quantity and a line per run, aligned by step or by tokens seen."""
    queries = [RunQueries(run) for run in runs]
    told = unique(names)
    gauges = [gauge for gauge in GAUGES.values() if gauge.title]
    charts = [chart for gauge in gauges if (chart := _chart(queries, told, by, gauge)) is not None]
    aligned = "Aligned by optimizer step." if by == "step" else "Aligned by training tokens."
    section = Section(id="all", nav="All", title="Side by side", charts=charts, text=aligned)
    none = Findings(found=(), early=(), judged="", alerts=())
    return RunPage(key="c", name="Comparison", info=[], findings=none, sections=[section], checks=[])


def unique(names: Sequence[str]) -> list[str]:
    """Names that tell runs apart, also where two have the same, and are short enough for a legend.

    >>> unique(["base-model-of-november-lr-3e-4-seed-1", "base-model-of-november-lr-3e-4-seed-2", "a", "a"])
    ['base-model-…-4-seed-1', 'base-model-…-4-seed-2', 'a (3)', 'a (4)']
    """
    short = [name if len(name) <= _MOST_NAME else f"{name[:11]}…{name[-9:]}" for name in names]
    return [name if short.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(short)]


def _chart(queries: Sequence[RunQueries], names: Sequence[str], by: Axis, gauge: Gauge) -> Chart | None:
    points, notes, scopes, table = [], [], [], gauge.table
    for one, run in zip(queries, names, strict=True):
        if not one.has(table):
            notes.append(f"{run} has no row of the table {table}.")
            points.append(_NOWHERE)
            continue
        scopes.append(one.scope(table).words)
        found, thinned = _points(one.run, gauge)
        placed = found.filter(pc.is_finite(found[by]))
        if lost := found.num_rows - placed.num_rows:
            notes.append(f"{run}: {lost} of {found.num_rows} points have no number of tokens.")
        # A run keeps its colour in every picture, also after one that has no value: a row that is not drawn.
        points.append(placed if placed.num_rows else _NOWHERE)
        told = (*thinned.note, *one.missing(table, (gauge.column,), gauge.condition))
        notes += [f"{run}: {note}" for note in told]
    if not scopes:
        return None
    data = pa.concat_tables(
        rows.append_column("run", pa.repeat(run, rows.num_rows))
        for rows, run in zip(points, names, strict=True)
    )
    known = pc.any(pc.is_finite(data["value"])).as_py()
    return Chart(
        id=gauge.column,
        title=gauge.title,
        text=gauge.text,
        spec=lines(
            y=gauge.axis,
            color="run",
            columns=2,
            label_limit=230,
            x=x_step() if by == "step" else x_step("training tokens", "tokens"),
        ),
        data=data.select((by, "run", "value", "low", "high")) if known else pa.table({}),
        metrics=((table, gauge.column),),
        scope=", ".join(dict.fromkeys(scopes)),
        notes=(*notes, *(_corpora(queries, names) if table == "probe_loss" else ())),
    )


def _points(run: Run, gauge: Gauge) -> tuple[pa.Table, Buckets]:
    """Per bucket: where it is by step and by tokens; mean, smallest and largest value, NaN for null."""
    columns = gauge_columns(run, (gauge,))
    step, value, _ = evaluate_by_step(gauge, columns)
    tokens = evaluate_by_step(replace(gauge, column="tokens_seen", how="max", place=""), columns).value
    thinned = buckets(len(step), SERIES_BUCKETS)
    bucket = np.arange(len(step)) // thinned.size

    def over(how: How, values: NDArray[np.float64]) -> NDArray[np.float64]:
        summed = Gauge(key="", table="", column="value", how=how)
        return evaluate_by_step(summed, {"step": bucket, "value": values}).value

    points = {
        "step": step[:: thinned.size].astype(np.float64),
        "tokens": over("mean", tokens),
        "value": over("mean", value),
        "low": over("min", value),
        "high": over("max", value),
    }
    return pa.table(points), thinned


_NOWHERE = pa.table(dict.fromkeys(("step", "tokens", "value", "low", "high"), np.array([np.nan])))


def _corpora(queries: Sequence[RunQueries], names: Sequence[str]) -> list[str]:
    """Said where runs were probed on different text."""
    known = {
        run: sorted({row["h"] for row in one.rows("select distinct corpus_hash as h from probe_loss")})
        for one, run in zip(queries, names, strict=True) if one.has("probe_loss")
    }  # fmt: skip
    if len({tuple(hashes) for hashes in known.values()}) <= 1:
        return []
    told = "; ".join(f"{run}: {', '.join(h[:12] for h in hashes)}" for run, hashes in known.items())
    return [f"Not comparable: the corpora differ ({told})."]
