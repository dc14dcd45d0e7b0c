"""The per-visit table of a traced step, and when it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loopscope.trackers.protocol import VisitTable

Row = Mapping[str, Any]

MAX_ROWS = 1000
"""Visits of one table: W&B's page shows some thousands of cells well, and the file stays under 200 kB."""
MAX_TABLES = 64
"""Tables of one attempt. W&B stores each as a file."""
GROWTH = 1.25
"""The next table comes when the step has grown by this: about 50 tables from step 1 to 100,000, dense at the start,
where routing changes fast."""

_KEYS = ("block", "unrolled_pos", "loop_step", "layer_idx", "num_experts", "top_k")
_ROUTER = (
    "load_entropy_ratio",
    "maxvio_count",
    "dead_experts",
    "token_entropy_ratio",
    "mutual_information",
    "margin_mean",
    "z_mean",
    "logit_abs_max",
)
_RESIDUAL = ("rms", "token_correlation")
_TRANSITION = ("relative_delta", "growth", "topk_overlap")

COLUMNS = ("step", *_KEYS, *_ROUTER, *_RESIDUAL, *_TRANSITION)
"""The last three are those of the pair that ends at the visit, one loop step before (`step_boundary`)."""
DISTRIBUTIONS = ("load_entropy_ratio", "maxvio_count", "relative_delta")
"""Columns whose spread over visits is worth a picture."""

NEEDED = frozenset((*COLUMNS, "kind", "to_pos", "state_cosine"))
"""Columns of a trace's rows that scalars and table are made of."""


def visit_table(step: int, tables: Mapping[str, Sequence[Row]]) -> VisitTable | None:
    """The table of one traced step from its rows, by depth; None where nothing was routed."""
    router = sorted(tables.get("router", ()), key=lambda row: row["unrolled_pos"])
    if not router:
        return None
    residual = {row["unrolled_pos"]: row for row in tables.get("residual", ())}
    pairs = {row["to_pos"]: row for row in tables.get("transition", ()) if row.get("kind") == "step_boundary"}
    kept = _thinned(router)
    rows = []
    for row in kept:
        position = row["unrolled_pos"]
        cells = [step, *(row.get(name) for name in (*_KEYS, *_ROUTER))]
        cells += [residual.get(position, {}).get(name) for name in _RESIDUAL]
        cells += [pairs.get(position, {}).get(name) for name in _TRANSITION]
        rows.append(tuple(cells))
    return VisitTable(columns=COLUMNS, rows=tuple(rows), left_out=len(router) - len(kept))


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """At most MAX_ROWS, evenly over the depth, the first and the last among them."""
    if len(rows) <= MAX_ROWS:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]


class TableSchedule:
    """Which traced steps show their table."""

    def __init__(self) -> None:
        self.shown = 0
        """Tables so far."""
        self._last: int | None = None

    def is_due(self, step: int) -> bool:
        """True where the table of `step` is to be shown; asking counts as showing."""
        if self._last is not None and step < max(self._last + 1, self._last * GROWTH):
            return False
        if self.shown >= MAX_TABLES:
            return False
        self.shown, self._last = self.shown + 1, step
        return True
