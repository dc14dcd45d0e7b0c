"""The loss and its parts: first, last, lowest, and whether they add up."""

from operator import itemgetter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from loopscope.analysis import Run, scope_of
from loopscope.catalog.registry import TABLES
from loopscope.cli.console import make_table, titled
from loopscope.cli.sections.rows import change, fetch, missing_note

_CLOSURE_LIMIT = 1e-4


def section(run: Run) -> list[RenderableType]:
    """One row per component; None of it where no step was recorded."""
    columns = [column.name for column in TABLES["loss"].shown("summary")]
    found = fetch(
        run,
        "loss",
        f"select step, {', '.join(columns)}, null_reasons, closure_error, nonfinite_fields from loss where {{where}} "
        "order by step",
    )
    if not found:
        return [Text("Loss: no step recorded", style="yellow")]
    first, last = found[0], found[-1]
    lowest = {
        name: min((row for row in found if row[name] is not None), key=itemgetter(name), default={})
        for name in columns
    }
    cells = [
        (name, first[name], last[name], change(first[name], last[name]), low.get(name), low.get("step"))
        for name, low in lowest.items()
    ]
    table = make_table(["", "first", "last", "change", "lowest", "at step"], cells, left=[""])
    return [
        *titled(f"Loss (nats{scope_of(run, 'loss').note})", table),
        *missing_note((first, last), columns),
        _closure(found),
        *_nonfinite(found),
    ]


def _closure(found: list[dict[str, Any]]) -> Text:
    checked = [
        (row["step"], abs(row["closure_error"]), abs(row["total_loss"] or 1.0))
        for row in found
        if row["closure_error"] is not None
    ]
    if not checked:
        return Text("closure: not checked", style="yellow")
    broken = [step for step, error, total in checked if error > _CLOSURE_LIMIT * max(1.0, total)]
    most = max(error for _, error, _ in checked)
    text = f"closure: |total − sum of parts| at most {most:.1e} over {len(checked)} step(s)"
    if broken:
        return Text(f"{text}; too large at {len(broken)} step(s), first {broken[0]}", style="red")
    return Text(text, style="dim")


def _nonfinite(found: list[dict[str, Any]]) -> list[Text]:
    steps = [row for row in found if row["nonfinite_fields"]]
    return [
        Text(
            f"non-finite at {len(steps)} step(s), first {one['step']}: {one['nonfinite_fields']}", style="red"
        )
        for one in steps[:1]
    ]
