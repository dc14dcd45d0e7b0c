"""The writer beside the store: rows untouched, whatever trackers do."""

import json

import pytest
from tracker_helpers import Remembering

from loopscope.collect import MemoryWriter, RowWriter
from loopscope.trackers import GuardedTracker, TrackingWriter

KEYS = {"run_id": "r", "attempt": 2, "aggregation_scope": "global", "step": 5, "world_size": 4}


def made(*trackers, inner=None, on_error="record", keys=None):
    inner = inner or MemoryWriter()

    def start(tell):
        guarded = [
            GuardedTracker(f"t{i}", lambda t=tracker: t, limit=60, on_error=on_error, tell=tell)
            for i, tracker in enumerate(trackers)
        ]
        for each in guarded:
            each.start()
        return guarded

    return inner, TrackingWriter(inner, start, keys=KEYS | (keys or {}), attempt=2, on_error=on_error)


def loss(step, **more):
    return {**KEYS, "step": step, "task_loss": 1.0 / step, "total_loss": 1.0, **more}


def test_rows_go_through_as_they_are():
    inner, writer = made(Remembering(fails_at=range(100)))
    assert isinstance(writer, RowWriter)
    rows = [loss(step) for step in range(1, 9)]
    for row in rows[:4]:
        writer.append("loss", row)
    writer.append_many("loss", rows[4:])
    writer.append_many("anything", [{"step": 1}, {"step": 2}])
    writer.flush(durable=True)
    writer.close()
    writer.close_trackers()
    assert inner.tables["loss"] == rows
    assert inner.tables["anything"] == [{"step": 1}, {"step": 2}]
    assert (inner.flushes, inner.closed, writer.dropped, writer.errors) == (1, True, 0, 0)


def test_what_happens_to_a_tracker_is_a_row_with_the_runs_keys():
    inner, writer = made(Remembering(fails_at=range(2, 100)))
    for step in range(6, 16):
        writer.append("loss", loss(step, tokens_seen=step))
    writer.append("loss", {**loss(16), "aggregation_scope": "rank_local", "rank": 3})
    first, lost, off = inner.rows("health")
    assert first == {
        **KEYS,
        "event": "tracker_started",
        "severity": "info",
        "count": None,
        "detail": "t0: memory",
    }
    assert (lost["event"], lost["severity"], lost["step"], lost["tokens_seen"]) == (
        "tracker_failed",
        "warn",
        7,
        7,
    )
    assert (off["step"], off["count"]) == (9, 3)
    assert "t0: is off after 3 failures in a row" in off["detail"]


def test_one_tracker_that_fails_costs_the_others_nothing():
    good = Remembering()
    _, writer = made(Remembering(fails_at=range(100)), good)
    for step in range(1, 6):
        writer.append("loss", loss(step))
    writer.close()
    assert [values.step for values in good.steps] == [1, 2, 3, 4, 5]


def test_seconds_of_the_trackers_count_as_loopscopes_own():
    inner, writer = made(Remembering())
    writer.append("loss", loss(1))
    timing = {"event": "timing", "value": 0.5, "detail": json.dumps({"reduce": 0.5})}
    writer.append_many("health", [{**KEYS, **timing}])
    (row,) = inner.rows("health", event="timing")
    detail = json.loads(row["detail"])
    assert detail["reduce"] == 0.5
    assert detail["trackers"] > 0
    assert row["value"] == pytest.approx(0.5 + detail["trackers"], abs=1e-5)


def test_a_row_that_cannot_be_judged_is_written_nevertheless():
    inner, writer = made(Remembering())
    writer.append("router", {**KEYS, "maxvio_count": "not a number", "unrolled_pos": 0})
    writer.append("loss", loss(5))
    writer.close()
    assert len(inner.rows("router")) == 1
    assert writer.errors == 1
    _, strict = made(Remembering(), on_error="raise")
    strict.append("router", {**KEYS, "maxvio_count": "not a number", "unrolled_pos": 0})
    with pytest.raises(ValueError, match="not a number"):
        strict.append("loss", loss(5))


def test_an_alert_reaches_every_tracker_also_when_one_fails():
    class Deaf(Remembering):
        def alert(self, notice):
            raise ConnectionError("gone")

    good = Remembering()
    _, writer = made(Deaf(), good)
    with pytest.raises(ConnectionError):
        writer.alert("notice")
    assert good.alerts == ["notice"]


def test_one_that_cannot_end_keeps_no_other_and_no_row_from_ending():
    class BadEnd(Remembering):
        def close(self):
            raise OSError("disk full")

    good = Remembering()
    inner, writer = made(BadEnd(), good, on_error="raise")
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert good.closed
    assert inner.closed


def test_alerts_of_the_end_find_the_trackers_open():
    tracker = Remembering()

    class Settling(MemoryWriter):
        def settle(self):
            assert not tracker.closed
            writer.alert("the last")

    inner, writer = made(tracker, inner=Settling())
    writer.close()
    assert tracker.alerts == ["the last"]
    assert tracker.closed
    assert inner.closed


def test_the_last_step_is_sent_at_the_end():
    tracker = Remembering()
    _, writer = made(tracker)
    writer.append("router", {**KEYS, "unrolled_pos": 0, "block": "head", "maxvio_count": 1.0})
    writer.close()
    assert tracker.steps[0].scalars["moe/maxvio_max"] == 1.0
    assert tracker.closed
