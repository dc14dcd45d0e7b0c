"""Rows go to the store first, then to the observers in their order, whatever one of them does."""

import json

import pytest

from loopscope.collect import MemoryWriter, ObservedWriter, RowWriter


class Watcher:
    def __init__(self, name, happened, *, writer=None, fails=()):
        self.name, self.happened, self.writer, self.fails = name, happened, writer, fails

    def see(self, table, rows):
        self._say("see", table, len(rows))
        if self.writer is not None and rows and table != "health":
            self.writer.append("health", {"event": self.name, "severity": "warn"})

    def close(self):
        self._say("close")

    def _say(self, what, *more):
        self.happened.append((self.name, what, *more))
        if what in self.fails:
            raise OSError(f"{self.name} cannot {what}")


class Store(MemoryWriter):
    def __init__(self, happened):
        super().__init__()
        self.happened = happened

    def append_many(self, table, rows):
        self.happened.append(("store", table, len(rows)))
        super().append_many(table, rows)

    def close(self):
        self.happened.append(("store", "close"))


def run(*, fails=()):
    """(what happened, the store, the writer) of a run with alerts and trackers that write about every other row."""
    happened = []
    store = Store(happened)
    alerts = Watcher("alerts", happened, writer=store, fails=fails)
    trackers = Watcher("trackers", happened, writer=ObservedWriter(store, [alerts]), fails=fails)
    return happened, store, ObservedWriter(store, [alerts, trackers], timed={"trackers": trackers})


def test_the_store_first_then_the_observers_and_nobody_sees_rows_of_its_own():
    happened, store, writer = run()
    assert isinstance(writer, RowWriter)
    writer.append_many("loss", [{"step": 1}, {"step": 2}])
    assert happened == [
        ("store", "loss", 2),
        ("alerts", "see", "loss", 2),
        ("trackers", "see", "loss", 2),
        ("store", "health", 1),  # what the trackers say
        ("alerts", "see", "health", 1),
    ]
    assert [row["event"] for row in store.rows("health")] == ["alerts", "trackers"]
    assert store.tables["loss"] == [{"step": 1}, {"step": 2}]


def test_at_the_end_the_observers_close_in_their_order_and_the_store_last():
    happened, store, writer = run()
    writer.flush(durable=True)
    writer.close()
    assert happened == [
        ("alerts", "see", "", 0),
        ("trackers", "see", "", 0),
        ("alerts", "close"),
        ("trackers", "close"),
        ("store", "close"),
    ]
    assert (store.flushes, writer.dropped, writer.fsync_failures) == (1, 0, 0)


def test_an_observer_that_raises_costs_no_row_and_no_end():
    happened, store, writer = run(fails=("see", "close"))
    with pytest.raises(OSError, match="alerts cannot see"):
        writer.append("loss", {"step": 1})
    assert store.tables["loss"] == [{"step": 1}]
    with pytest.raises(OSError, match="cannot close"):
        writer.close()
    assert happened[-3:] == [("alerts", "close"), ("trackers", "close"), ("store", "close")]


def test_a_timing_row_counts_the_seconds_of_who_is_timed():
    _, store, writer = run()
    timing = {"event": "timing", "value": 0.5, "detail": json.dumps({"reduce": 0.5})}
    for _ in range(2):
        writer.append("loss", {"step": 1})
        writer.append_many("health", [timing])
    for row in store.rows("health", event="timing"):
        detail = json.loads(row["detail"])
        assert set(detail) == {"reduce", "trackers"}
        assert detail["trackers"] > 0
        assert row["value"] == pytest.approx(0.5 + detail["trackers"], abs=1e-5)
