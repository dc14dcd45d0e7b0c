"""The rules over the rows of a run that are stored already: for a report, and for an attempt that goes on with it.

The engine is the one that runs beside the training, given many steps at once, so that a replay costs as much as
reading the columns, and a sick visit a little more.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loopscope.alerts.batches import arrow_column, batches
from loopscope.alerts.engine import AlertEngine
from loopscope.alerts.replay_state import ReplayState, Told, key_of
from loopscope.catalog.alert_settings import AlertSettings
from loopscope.catalog.row_batch import RowBatch
from loopscope.catalog.rule_registry import RULE_COLUMNS, RULES
from loopscope.store import RunReader, live_ranges


def replay_run(reader: RunReader, settings: AlertSettings) -> AlertEngine:
    """The rules' state after the run's live rows: that of the training itself, had the rules been on."""
    engine = AlertEngine(settings)
    for table in RULE_COLUMNS:
        for batch in _events(reader) if table == "health" else batches(reader, table):
            engine.observe(batch)
    return engine


def state_before(reader: RunReader, settings: AlertSettings, attempt: int) -> ReplayState:
    """What the new attempt `attempt`, which has no rows yet, knows of the run before its first step."""
    # As if it had rows: those of its ancestors, up to where it goes on, are live.
    reader.live = live_ranges(reader.attempts, [attempt])
    engine = replay_run(reader, settings)
    told: set[Told] = set()
    live: set[Told] = set()
    columns = ("step", "attempt", "event", "rule", "subject", "since", "severity")
    for chunk in reader.iterate("health", live=False, columns=columns):
        for row in chunk.filter(pc.equal(chunk["event"], "alert")).to_pylist():
            key = (row["rule"], row["subject"], row["since"])
            # Who heard that it is critical need not hear that it is a warning.
            keys = {(*key, row["severity"]), (*key, "warn")}
            told |= keys
            part = reader.live.get(row["attempt"])
            live |= keys if part is not None and part.holds(row["step"]) else set()
    untold = tuple(
        alert for alert in engine.active if not RULES[alert.rule].at_once and key_of(alert) not in live
    )
    return ReplayState(engine=engine, told=frozenset(told), untold=untold)


def _events(reader: RunReader) -> Iterator[RowBatch]:
    """Health rows of every rank that are more than information."""
    found: list[pa.Table] = []
    for chunk in reader.iterate("health", columns=("step", "attempt", *RULE_COLUMNS["health"])):
        noticed = pc.not_equal(chunk["severity"], "info").fill_null(False)
        found += [chunk.filter(noticed)] if pc.any(noticed).as_py() else []
    if found:
        rows = pa.concat_tables(found)
        # Within an attempt they stay as they were written: a late loss's event comes late here as well.
        starts = [reader.live[attempt].start for attempt in rows["attempt"].to_pylist()]
        rows = rows.take(pa.array(np.argsort(starts, kind="stable")))
        yield RowBatch("health", partial(arrow_column, rows))
