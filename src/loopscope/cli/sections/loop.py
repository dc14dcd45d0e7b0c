"""Does the loop converge? How far one pass still moves the hidden state, first and last traced step."""

import itertools
from operator import itemgetter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from loopscope.analysis import Run, scope_of
from loopscope.catalog.gauge import equal_sql
from loopscope.catalog.registry import TABLES
from loopscope.cli.console import make_table, titled
from loopscope.cli.sections.rows import fetch, gauges_line, missing_note


def section(run: Run) -> list[RenderableType]:
    """A row per pair of consecutive loop steps, at the first and the last traced step."""
    transition = TABLES["transition"]
    columns = {column.name: column.heading for column in transition.shown("summary")}
    found = fetch(
        run,
        "transition",
        f"with t as (select * from transition where {{where}} and {equal_sql(transition.shown_rows)}) "
        "select step, from_loop_step, to_loop_step, count(distinct to_layer_idx) as layers, "
        f"{', '.join(f'avg({name}) as {name}' for name in columns)}, any_value(null_reasons) as null_reasons "
        "from t where step in ((select min(step) from t), (select max(step) from t)) "
        "group by all order by step, to_loop_step",
    )
    if not found:
        return [Text("Loop: no pair of loop steps traced", style="yellow")]
    cells: list[tuple[Any, ...]] = []
    for step, group in itertools.groupby(found, key=itemgetter("step")):
        pairs = [
            (f"{r['from_loop_step']} → {r['to_loop_step']}", *(r[name] for name in columns)) for r in group
        ]
        cells += [("",)] * bool(cells) + [(step, *pairs[0]), *(("", *pair) for pair in pairs[1:])]
    table = make_table(["step", "loop step", *columns.values()], cells, digits=3)
    layers = f"{max(row['layers'] for row in found)} layer(s){scope_of(run, 'transition').note}"
    return [
        *titled(f"Loop convergence, one pass to the next (mean of {layers})", table),
        *missing_note(found, list(columns)),
        _verdict(found),
        gauges_line(run, "transition", "residual"),
    ]


def _verdict(found: list[dict[str, Any]]) -> Text:
    # Said of the last traced step alone: it is what the model does now.
    last = [row for row in found if row["step"] == found[-1]["step"] and row["relative_delta"] is not None]
    if len(last) < 2:
        return Text("one pair of loop steps: nothing to compare", style="dim")
    deltas = [row["relative_delta"] for row in last]
    shrinking = all(after < before for before, after in itertools.pairwise(deltas))
    trend = "shrinks with every pass" if shrinking else "does not shrink with every pass"
    return Text(
        f"at step {last[0]['step']} the move per pass {trend} ({deltas[0]:.3f} → {deltas[-1]:.3f})",
        style="dim",
    )
