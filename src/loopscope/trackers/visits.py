"""The per-visit table of a traced step, and when it is shown."""

from collections.abc import Mapping, Sequence
from typing import Any

from loopscope.catalog.registry import TABLES
from loopscope.catalog.rows import columns_of, evenly, visit_labels
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
# Table → what names the visit that a row belongs to.
_POSITION = {"router": "unrolled_pos", "residual": "unrolled_pos", "transition": "to_pos"}
_SHOWN = {table: tuple(c.name for c in TABLES[table].shown("visits")) for table in _POSITION}

COLUMNS = ("step", "visit", *_KEYS, *(name for names in _SHOWN.values() for name in names))
"""Those of `transition` are of the pair that ends at the visit, one loop step before (`step_boundary`)."""
DISTRIBUTIONS = tuple(c.name for table in _POSITION for c in TABLES[table].shown("spread"))
"""Columns whose spread over visits is worth a picture."""

NEEDED: Mapping[str, frozenset[str]] = {
    table.name: frozenset(
        (
            *(name for gauge in table.gauges for name in gauge.needs),
            *_SHOWN.get(table.name, ()),
            *(_KEYS if table.name == "router" else ()),
            *filter(None, (_POSITION.get(table.name),)),
            *(name for name, _ in table.shown_rows),
        )
    )
    for table in TABLES.values()
    if table.gauges
}
"""Table → the columns that scalars and the table of visits are made of."""


def visit_table(step: int, tables: Mapping[str, Sequence[Row]]) -> VisitTable | None:
    """The table of one traced step from its rows, by depth; None where nothing was routed."""
    router = sorted(tables.get("router", ()), key=lambda row: row["unrolled_pos"])
    if not router:
        return None
    labels = visit_labels(columns_of(router, _KEYS))
    kept = evenly(list(zip(labels, router, strict=True)), MAX_ROWS)
    others = {
        table: {
            row[_POSITION[table]]: row
            for row in tables.get(table, ())
            if all(row.get(name) == value for name, value in TABLES[table].shown_rows)
        }
        for table in ("residual", "transition")
    }
    rows = tuple(
        (
            step,
            label,
            *(row.get(name) for name in (*_KEYS, *_SHOWN["router"])),
            *(
                at.get(row["unrolled_pos"], {}).get(name)
                for table, at in others.items()
                for name in _SHOWN[table]
            ),
        )
        for label, row in kept
    )
    return VisitTable(columns=COLUMNS, rows=rows, left_out=len(router) - len(kept))


class TableSchedule:
    """Which traced steps show their table."""

    def __init__(self) -> None:
        self.shown = 0
        """Tables so far."""
        self._last: int | None = None

    def is_due(self, step: int) -> bool:
        """True where the table of `step` is to be shown; asking counts as showing."""
        is_early = self._last is not None and step < max(self._last + 1, self._last * GROWTH)
        if is_early or self.shown >= MAX_TABLES:
            return False
        self.shown, self._last = self.shown + 1, step
        return True
