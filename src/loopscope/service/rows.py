"""Rows of a table over the API: known tables and columns only, and never more than can be paid for."""

import datetime
import math
from collections.abc import Mapping
from typing import Any

from loopscope.analysis import Run
from loopscope.analysis.records import records
from loopscope.errors import ConfigError
from loopscope.store import TABLES

MOST_ROWS = 10_000
MOST_COLUMNS = 32


def rows(run: Run, table: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Rows of `table` as JSON: ?columns=a,b&from=STEP&to=STEP&limit=N.

    Raises:
        ConfigError: an unknown table or column, or a number out of bounds; the message names it.
    """
    if table not in TABLES:
        raise ConfigError(f"there is no table {table[:40]!r}; expected one of {', '.join(TABLES)}")
    known = TABLES[table].names
    columns = [name for name in query.get("columns", "").split(",") if name] or [
        name for name in known if not TABLES[table].arrow.field(name).type.num_fields
    ][:MOST_COLUMNS]
    if unknown := [name for name in columns if name not in known]:
        raise ConfigError(
            f"table {table!r} has no column {unknown[0][:40]!r}; expected some of {', '.join(known)}"
        )
    if len(columns) > MOST_COLUMNS:
        raise ConfigError(f"got {len(columns)} columns, expected {MOST_COLUMNS} at most; ask twice")
    limit = number(query, "limit", 1000, 1, MOST_ROWS)
    chosen = (
        f"where step between {number(query, 'from', 0)} and {number(query, 'to', 2**62)} order by step"
        if "step" in known
        else "order by attempt"
    )
    names = ", ".join(f'"{name}"' for name in columns)
    text = f"select {names} from {table} {chosen} limit {limit + 1}"
    there = records(run, text) if table in run.tables else ()
    found = [[_plain(row[name]) for name in columns] for row in there]
    return {"table": table, "columns": columns, "rows": found[:limit], "truncated": len(found) > limit}


def number(query: Mapping[str, str], name: str, default: int, least: int = 0, most: int = 2**62) -> int:
    """A whole number of a query, in decimal digits.

    >>> number({"limit": "0012"}, "limit", 5), number({}, "limit", 5)
    (12, 5)

    Raises:
        ConfigError: it is none, has more digits than any step, or is out of bounds.
    """
    text = query.get(name)
    if text is None:
        return default
    is_whole = len(text) <= 40 and text.isascii() and text.isdigit()
    if not is_whole or not least <= int(text) <= most:
        raise ConfigError(f"{name} is {text[:40]!r}, expected an integer from {least} to {most}")
    return int(text)


def _plain(cell: Any) -> Any:
    if isinstance(cell, float):
        # The collector writes none, another writer might; JSON knows no such number.
        return cell if math.isfinite(cell) else None
    if isinstance(cell, list):
        return [_plain(item) for item in cell]
    return cell.isoformat() if isinstance(cell, datetime.datetime) else cell
