"""The last deep probe: what each pass through the loop adds to the prediction, and how the visits route."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from loopscope.analysis import Run
from loopscope.cli.console import make_table, titled
from loopscope.cli.sections.rows import VISIT_COLUMNS, fetch, label, missing_note

_READOUT = ("loss_mean", "kl_from_previous", "entropy_mean", "argmax_settled")


def section(run: Run) -> list[RenderableType]:
    """A table of readouts, one of the routing of every visit; nothing where no deep probe ran."""
    return [*_readouts(run), *_visits(run)]


def _last(run: Run, table: str, columns: str, order: str) -> list[dict[str, Any]]:
    return fetch(
        run,
        table,
        f"select step, corpus_name, null_reasons, {columns} from {table} where {{where}} and "
        f"step = (select max(step) from {table}) order by {order}",
    )


def _readouts(run: Run) -> list[RenderableType]:
    found = _last(run, "probe_readout", f"readout, loop_step, {', '.join(_READOUT)}", "readout, loop_step")
    if not found:
        return []
    table = make_table(
        ["after loop step", "loss, nats", "KL from the one before", "entropy", "arg-max settled"],
        [(row["loop_step"], *(row[name] for name in _READOUT)) for row in found],
    )
    title = (
        f"Readout per loop step, through the {found[0]['readout']}, probe at step {found[0]['step']}, corpus "
        f"{found[0]['corpus_name']}"
    )
    return [*titled(title, table), *missing_note(found, _READOUT)]


def _visits(run: Run) -> list[RenderableType]:
    margins = _last(
        run,
        "probe_margin",
        f"{VISIT_COLUMNS}, quantity, shuffle_scope, rho_cal, cell, calibrated",
        "unrolled_pos",
    )
    if not margins:
        return []
    growth = {
        row["unrolled_pos"]: row
        for row in _last(
            run, "probe_perturbation", "unrolled_pos, amplification, flipped_share", "unrolled_pos"
        )
    }
    rho = {(row["unrolled_pos"], row["quantity"]): row["rho_cal"] for row in margins}
    seen = {row["unrolled_pos"]: row for row in margins}
    cells = [
        (
            position,
            label(row),
            *(rho.get((position, quantity)) for quantity in ("margin", "selection_gap")),
            row["cell"],
            *(growth.get(position, {}).get(name) for name in ("amplification", "flipped_share")),
        )
        for position, row in seen.items()
    ]
    columns = ["pos", "visit", "margin", "selection gap", "reading", "disturbance", "choice flipped"]
    table = make_table(columns, cells, left=["visit", "reading"], digits=3)
    one = margins[0]
    title = (
        f"Margins over their null ({one['shuffle_scope']} shuffles; 1: no structure), growth of a disturbance; "
        f"step {one['step']}"
    )
    parts: list[RenderableType] = titled(title, table)
    if not all(row["calibrated"] for row in margins):
        parts.append(Text("scores are bounded: margins without structure lie outside 1", style="dim"))
    if not growth:
        parts.append(Text("no perturbation: see probe_skipped in the health table", style="dim"))
    return parts
