"""Reads rows for people, and says why a value is missing."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from loopscope.analysis import Run
from loopscope.analysis.gauges import last_values
from loopscope.analysis.records import records
from loopscope.analysis.scope import scope_of
from loopscope.catalog.registry import TABLES
from loopscope.catalog.rows import VISIT, VISIT_INDEX, visit_label
from loopscope.cli.console import MISSING, number

Row = Mapping[str, Any]

_ROUTER = TABLES["router"]
WORST = next(gauge.column for gauge in _ROUTER.gauges if gauge.how == "place of max")
"""The column by which visits are the worst ones."""
WORST_COLUMNS = sorted(_ROUTER.shown("worst"), key=lambda column: column.name != WORST)
"""What the worst visits are shown with, that column first."""
VISIT_COLUMNS = f"{', '.join(VISIT)}, {VISIT_INDEX} as visit_index"
"""What `label` needs, as SQL over whole steps."""


def fetch(run: Run, table: str, query: str) -> list[dict[str, Any]]:
    """Rows of `query` over the live rows of `table`; none where the run has no such table yet.

    Args:
        run: the run.
        table: the table.
        query: `{where}` in it becomes the condition of the rows that speak for the run.
    """
    if table not in run.tables:
        return []
    if "{where}" in query:
        query = query.replace("{where}", scope_of(run, table).where)
    return list(records(run, query))


def label(row: Row) -> str:
    """What a row's visit is called; the row has VISIT_COLUMNS."""
    return visit_label(row["block"], row["loop_step"], row["layer_idx"], row["visit_index"])


def gauges_line(run: Run, *tables: str) -> Text:
    """The gauges of tables at their last step, by the keys that trackers know."""
    found = [
        f"{key} {number(last.value)}"
        + (f" ({last.skipped} rows without a value left out)" if last.skipped else "")
        for key, last in last_values(run, *tables).items()
    ]
    return Text("at the last step: " + ", ".join(found), style="dim")


def change(first: float | None, last: float | None) -> str:
    """Signed difference of two values; "–" where one is missing."""
    if first is None or last is None:
        return MISSING
    if math.isclose(first, last, rel_tol=1e-12):
        return "0"  # the last bit of an average
    return f"{'+' if last > first else ''}{number(last - first)}"


def missing_note(rows: Iterable[Row], columns: Sequence[str]) -> list[Text]:
    """One line that gives the reason of every "–" among `columns`; none where nothing is missing.

    Rows carry `null_reasons`, the JSON text of the tables.
    """
    reasons: dict[str, set[str]] = {}
    for row in rows:
        known = json.loads(row.get("null_reasons") or "{}")
        for column in columns:
            if row.get(column) is None:
                reasons.setdefault(column, set()).add(known.get(column, "not recorded"))
    text = "; ".join(f"{column}: {', '.join(sorted(found))}" for column, found in reasons.items())
    return [Text(f"{MISSING} {text}", style="dim")] if reasons else []
