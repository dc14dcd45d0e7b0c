"""Does the loop converge? How far one pass still moves the hidden state, first and last traced step."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from loopscope.cli.console import make_table, titled
from loopscope.cli.sections.rows import cell, missing_note, records, scope_filter

if TYPE_CHECKING:
    from loopscope.analysis import Run

_COLUMNS = ("relative_delta", "growth", "state_cosine", "topk_overlap", "overlap_chance")


def section(run: Run) -> list[RenderableType]:
    """A row per pair of consecutive loop steps, at the first and the last traced step."""
    averages = ", ".join(f"avg({name}) as {name}" for name in _COLUMNS)
    rows = records(
        run,
        "transition",
        f"with t as (select * from transition where {scope_filter(run, 'transition')} and kind = "
        "'step_boundary') select step, from_loop_step, to_loop_step, count(distinct to_layer_idx) as "
        f"layers, {averages}, any_value(null_reasons) as null_reasons from t where step in ((select "
        "min(step) from t), (select max(step) from t)) group by all order by step, to_loop_step",
    )
    if not rows:
        return [Text("Loop: no pair of loop steps traced", style="yellow")]
    layers = max(row["layers"] for row in rows)
    table = make_table(
        ["step", "loop step", "relative delta", "growth", "state cosine", "top-k overlap", "by chance"],
    )
    previous = None
    for row in rows:
        if previous not in (None, row["step"]):
            table.add_section()
        shown = str(row["step"]) if row["step"] != previous else ""
        table.add_row(shown, _pair(row), *(cell(row[name], 3) for name in _COLUMNS))
        previous = row["step"]
    note = missing_note(rows, _COLUMNS)
    title = f"Loop convergence, one pass to the next (mean of {layers} layer(s))"
    return [*titled(title, table), *([note] if note else []), _verdict(rows)]


def _pair(row: dict[str, Any]) -> str:
    return f"{row['from_loop_step']} → {row['to_loop_step']}"


def _verdict(rows: list[dict[str, Any]]) -> Text:
    # Said of the last traced step alone: it is what the model does now.
    last = [row for row in rows if row["step"] == rows[-1]["step"] and row["relative_delta"] is not None]
    if len(last) < 2:
        return Text("one pair of loop steps: nothing to compare", style="dim")
    deltas = [row["relative_delta"] for row in last]
    shrinking = all(after < before for before, after in pairwise(deltas))
    trend = "shrinks with every pass" if shrinking else "does not shrink with every pass"
    return Text(
        f"at step {last[0]['step']} the move per pass {trend} ({deltas[0]:.3f} → {deltas[-1]:.3f})",
        style="dim",
    )
