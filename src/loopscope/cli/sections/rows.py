"""Reads rows for the summary, and says why a value is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from loopscope.cli.console import MISSING, number

if TYPE_CHECKING:
    from loopscope.analysis import Run

Row = Mapping[str, Any]


def records(run: Run, table: str, query: str) -> list[dict[str, Any]]:
    """Rows of `query` over the live rows of `table`; none where the run has no such table yet."""
    if table not in run.tables:
        return []
    relation = run.sql(query)
    names = relation.columns
    return [dict(zip(names, values, strict=True)) for values in relation.fetchall()]


def scope_filter(run: Run, table: str) -> str:
    """SQL condition that picks global rows where there are any, else the ranks' own."""
    found = records(run, table, f"select count(*) as n from {table} where aggregation_scope = 'global'")
    return "aggregation_scope = 'global'" if found and found[0]["n"] else "aggregation_scope = 'rank_local'"


def cell(value: float | int | None, digits: int = 4) -> str:
    """A number for a table's cell; "–" where it is missing."""
    return number(value, digits)


def change(first: float | None, last: float | None) -> str:
    """Signed difference of two values; "–" where one is missing."""
    if first is None or last is None:
        return MISSING
    difference = last - first
    if abs(difference) <= 1e-12 * max(abs(first), abs(last)):
        return "0"  # an average over ranks may differ in its last bit
    return ("+" if difference > 0 else "") + number(difference)


def missing_note(rows: Iterable[Row], columns: Sequence[str]) -> Text | None:
    """One line that gives the reason of every "–" among `columns`; None where nothing is missing.

    Rows carry `null_reasons`, the JSON text of the tables.
    """
    reasons: dict[str, set[str]] = {}
    for row in rows:
        known = json.loads(row.get("null_reasons") or "{}")
        for column in columns:
            if row.get(column) is None:
                reasons.setdefault(column, set()).add(known.get(column, "not recorded"))
    if not reasons:
        return None
    text = "; ".join(f"{column}: {', '.join(sorted(found))}" for column, found in reasons.items())
    return Text(f"{MISSING} {text}", style="dim")
