"""How far the attempts before this one have logged, from the run's own rows."""

from pathlib import Path

import pyarrow as pa

from loopscope.catalog.registry import TABLES
from loopscope.store import RunReader


def logged_before(out: Path, attempt: int) -> int:
    """At least as many as earlier attempts gave a tracker values of steps; 0 at the first.

    A step comes once, or by parts: once for every table that has a gauge at most; an attempt ends with one more.

    Args:
        out: the run's folder.
        attempt: this attempt's number.

    Raises:
        StoreError: the run cannot be read.
    """
    if attempt <= 1:
        return 0
    reader, found = RunReader(out), 0
    for table in (table for table in reader.tables if table in TABLES and TABLES[table].gauges):
        rows: pa.Table = reader.read(table, live=False, columns=["attempt", "step"])
        found += rows.group_by(["attempt", "step"]).aggregate([]).num_rows
    return found + attempt - 1
