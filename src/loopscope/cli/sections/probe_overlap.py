"""Do loop steps choose the same experts? The overlap matrix of every layer, at the last probe."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from loopscope.analysis import Run
from loopscope.catalog.rows import evenly
from loopscope.cli.console import make_table, number, titled
from loopscope.cli.sections.rows import fetch, missing_note

_MOST_COLUMNS = 10
"""A wider matrix is shown at this many loop steps, spread evenly from the first to the last."""


def section(run: Run) -> list[RenderableType]:
    """A matrix per physical layer of the loop; nothing where no probe found a pair of loop steps."""
    found = fetch(
        run,
        "probe_overlap",
        "select step, corpus_name, corpus_hash, layer_idx, from_loop_step, to_loop_step, "
        "topk_overlap, overlap_chance, null_reasons from probe_overlap where {where} and "
        "step = (select max(step) from probe_overlap)",
    )
    parts: list[RenderableType] = []
    for corpus in sorted({row["corpus_hash"] for row in found}):
        of_corpus = [row for row in found if row["corpus_hash"] == corpus]
        for layer in sorted({row["layer_idx"] for row in of_corpus}):
            parts += _matrix([row for row in of_corpus if row["layer_idx"] == layer])
    return parts


def _matrix(rows: list[dict[str, Any]]) -> list[RenderableType]:
    every = sorted({row[name] for row in rows for name in ("from_loop_step", "to_loop_step")})
    steps = evenly(every, _MOST_COLUMNS)
    overlap = {(row["from_loop_step"], row["to_loop_step"]): row["topk_overlap"] for row in rows}
    cells = [
        (first, *(1 if one == first else overlap.get((min(first, one), max(first, one))) for one in steps))
        for first in steps
    ]
    table = make_table(["loop step", *(str(step) for step in steps)], cells, digits=3)
    one = rows[0]
    title = (
        f"Top-k overlap of loop steps, layer {one['layer_idx']}, probe at step {one['step']}, corpus "
        f"{one['corpus_name']}; by chance {number(one['overlap_chance'], 3)}"
    )
    found: list[RenderableType] = titled(title, table)
    if len(steps) < len(every):
        found.append(Text(f"{len(steps)} of {len(every)} loop steps shown", style="dim"))
    return [*found, *missing_note(rows, ["topk_overlap"])]
