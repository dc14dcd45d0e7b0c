"""The catalogue's gauges of a stored run: SQL fetches the rows, `loopscope.catalog.gauge` evaluates them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from loopscope.analysis.run import Run
from loopscope.analysis.scope import scope_of
from loopscope.catalog.gauge import Gauge, evaluate
from loopscope.catalog.registry import TABLES


class LastValue(NamedTuple):
    """A gauge at the last step that has a row for it."""

    value: float | None
    """None where it is null there, or where the table has no row."""
    skipped: int
    """Rows that were null and left out of a maximum, minimum, mean or sum."""


def last_values(run: Run, *tables: str) -> dict[str, LastValue]:
    """Key → every gauge of these tables, or of all, at the last step of its table."""
    found: dict[str, LastValue] = {}
    for name in tables or TABLES:
        if gauges := TABLES[name].gauges:
            columns = gauge_columns(run, gauges, last=True) if name in run.tables else None
            found |= {
                g.key: LastValue(None, 0) if columns is None else LastValue(*evaluate(g, columns))
                for g in gauges
            }
    return found


def gauge_columns(run: Run, gauges: Sequence[Gauge], *, last: bool = False) -> dict[str, NDArray[Any]]:
    """What gauges of one table are evaluated from: name → [rows], of the rows that speak for the run.

    Args:
        run: an opened run that has the gauges' table.
        gauges: of one table.
        last: only rows of the last step.

    Returns:
        `Gauge.needs`, `step` and `tokens_seen`; floats are NaN where they are null.
    """
    table = gauges[0].table
    names = dict.fromkeys(("step", "tokens_seen", *(name for gauge in gauges for name in gauge.needs)))
    conditions = dict.fromkeys(f"({gauge.condition})" for gauge in gauges)
    where = f"{scope_of(run, table).where} and ({' or '.join(conditions)})"
    if last:
        where += f" and step = (select max(step) from {table} where {where})"
    rows = run.sql(f"select {', '.join(names)} from {table} where {where}").to_arrow_table()
    return {name: rows[name].to_numpy() for name in names}
