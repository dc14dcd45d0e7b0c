"""The loss and its parts: first, last, lowest, and whether they add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from loopscope.cli.console import make_table, titled
from loopscope.cli.sections.rows import cell, change, missing_note, records, scope_filter

if TYPE_CHECKING:
    from loopscope.analysis import Run

_COLUMNS = ("task_loss", "lb_loss", "z_loss", "total_loss", "grad_norm", "lr")
_CLOSURE_LIMIT = 1e-4


def section(run: Run) -> list[RenderableType]:
    """One row per component; None of it where no step was recorded."""
    averages = ", ".join(f"avg({name}) as {name}" for name in (*_COLUMNS, "closure_error"))
    query = (
        f"select step, count(*) as ranks, any_value(null_reasons) as null_reasons, {averages}, "
        "max(abs(closure_error)) as closure_abs, string_agg(distinct nonfinite_fields, ', ') as nonfinite "
        f"from loss where {scope_filter(run, 'loss')} group by step order by step"
    )
    rows = records(run, "loss", query)
    if not rows:
        return [Text("Loss: no step recorded", style="yellow")]
    first, last = rows[0], rows[-1]
    scope = f", mean of {last['ranks']} ranks' own rows" if last["ranks"] > 1 else ""
    table = make_table(["", "first", "last", "change", "lowest", "at step"], left=[""])
    for name in _COLUMNS:
        present = [row for row in rows if row[name] is not None]
        low = min(present, key=lambda row: row[name]) if present else None
        table.add_row(
            name,
            cell(first[name]),
            cell(last[name]),
            change(first[name], last[name]),
            cell(low[name]) if low else cell(None),
            str(low["step"]) if low else cell(None),
        )
    notes = [missing_note((first, last), _COLUMNS), _closure(rows), _nonfinite(rows)]
    return [*titled(f"Loss (nats{scope})", table), *(note for note in notes if note is not None)]


def _closure(rows: list[dict[str, object]]) -> Text:
    checked = [row for row in rows if row["closure_abs"] is not None]
    if not checked:
        return Text("closure: not checked", style="yellow")
    errors = [float(str(row["closure_abs"])) for row in checked]
    broken = [
        row["step"]
        for row, error in zip(checked, errors, strict=True)
        if error > _CLOSURE_LIMIT * max(1.0, abs(float(str(row["total_loss"]))) if row["total_loss"] else 1.0)
    ]
    text = f"closure: |total − sum of parts| at most {max(errors):.1e} over {len(checked)} step(s)"
    if broken:
        return Text(f"{text}; too large at {len(broken)} step(s), first {broken[0]}", style="red")
    return Text(text, style="dim")


def _nonfinite(rows: list[dict[str, object]]) -> Text | None:
    steps = [row for row in rows if row["nonfinite"]]
    if not steps:
        return None
    return Text(
        f"non-finite at {len(steps)} step(s), first {steps[0]['step']}: {steps[0]['nonfinite']}", style="red"
    )
