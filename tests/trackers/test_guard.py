import threading
import time

import pytest
from tracker_helpers import Remembering

from loopscope.trackers import GuardedTracker, StepValues
from loopscope.trackers.guard import MAX_FAILURES


def values(step, **scalars):
    return StepValues(step=step, scalars=scalars or {"loss/task": float(step)})


def guarded(tracker, on_error="record", **more):
    told = []

    def start():
        if isinstance(tracker, Exception):
            raise tracker
        return tracker

    def tell(event, detail, count=None):
        told.append((event, detail, count))

    made = GuardedTracker("mine", start, limit=60, on_error=on_error, tell=tell, **more)
    made.start()
    return made, told


def test_values_go_through_and_the_start_is_told():
    tracker = Remembering()
    guard, told = guarded(tracker)
    guard.log(values(1))
    guard.close()
    assert [step.step for step in tracker.steps] == [1]
    assert tracker.closed
    assert told == [("tracker_started", "mine: memory", None)]


def test_a_failed_start_is_told_and_nothing_is_sent():
    guard, told = guarded(ConnectionError("no network"))
    for step in range(5):
        guard.log(values(step))
    guard.alert(None)
    guard.close()
    ((event, detail, _),) = told
    assert event == "tracker_failed"
    assert detail.startswith("mine: did not start, and is off: ConnectionError: no network (at ")
    assert (guard.is_on, guard.missed) == (False, 5)


def test_three_failures_in_a_row_switch_it_off():
    tracker = Remembering(fails_at=range(3, 100))
    guard, told = guarded(tracker)
    for step in range(1, 11):
        guard.log(values(step))
    guard.close()
    assert [step.step for step in tracker.steps] == [1, 2]
    assert tracker.calls == 2 + MAX_FAILURES
    assert guard.missed == 8
    assert tracker.closed
    assert [event for event, _, _ in told] == ["tracker_started", "tracker_failed", "tracker_failed"]
    assert [count for _, _, count in told[1:]] == [1, 3]
    assert told[1][1].startswith("mine: lost the values of a step: ConnectionError: the tracker is gone")
    assert told[2][1].startswith(
        "mine: is off after 3 failures in a row: ConnectionError: the tracker is gone"
    )


def test_failures_that_pass_are_told_once_and_leave_it_on():
    tracker = Remembering(fails_at=(1, 2, 4, 6, 7))
    guard, told = guarded(tracker)
    for step in range(1, 9):
        guard.log(values(step))
    assert guard.is_on
    assert [step.step for step in tracker.steps] == [3, 5, 8]
    assert [event for event, _, _ in told].count("tracker_failed") == 1
    assert guard.missed == 5


def test_under_raise_everything_gets_out():
    with pytest.raises(ConnectionError, match="no network"):
        guarded(ConnectionError("no network"), "raise")
    guard, _ = guarded(Remembering(fails_at=(1,)), "raise")
    with pytest.raises(ConnectionError, match="gone"):
        guard.log(values(1))


def test_keys_beyond_the_budget_are_refused_counted_and_told():
    tracker = Remembering()
    guard, told = guarded(tracker)
    for step in range(1, 4):
        guard.log(values(step, **{f"custom/{step}-{i}": 1.0 for i in range(100)}, **{"loss/task": 2.0}))
    guard.close()
    keys = {key for step in tracker.steps for key in step.scalars}
    assert "loss/task" in keys
    assert len(keys) <= 60
    first, last = (row for row in told if row[0] == "tracker_keys")
    assert "mine: takes 60 keys at most; refused so far: custom/1-" in first[1]
    assert last[2] == 300 - (len(keys) - 1)


class Hanging(Remembering):
    def __init__(self):
        super().__init__()
        self.may_end = threading.Event()

    def close(self):
        self.may_end.wait(60)


def test_the_end_of_training_does_not_wait_for_a_tracker_that_hangs():
    tracker = Hanging()
    guard, told = guarded(tracker, close_seconds=0.05)
    began = time.monotonic()
    guard.close()
    assert time.monotonic() - began < 30
    tracker.may_end.set()
    assert told[-1] == ("tracker_failed", "mine: did not end within 0.05 s, and is left to itself", None)


class BadEnd(Remembering):
    def close(self):
        raise OSError("disk full")


def test_a_failure_at_the_end_is_told():
    guard, told = guarded(BadEnd())
    guard.close()
    guard.close()
    assert told[-1][0] == "tracker_failed"
    assert told[-1][1].startswith("mine: at the end: OSError: disk full")
    assert len(told) == 2
    strict, _ = guarded(BadEnd(), "raise")
    with pytest.raises(OSError, match="disk full"):
        strict.close()


def test_an_alert_does_not_come_in_the_middle_of_a_step():
    inside = threading.Event()
    overlapped = []

    class Slow(Remembering):
        def log(self, values):
            inside.set()
            time.sleep(0.05)
            inside.clear()

        def alert(self, notice):
            overlapped.append(inside.is_set())

    guard, _ = guarded(Slow())
    thread = threading.Thread(target=lambda: (inside.wait(), guard.alert(None)))
    thread.start()
    guard.log(values(1))
    thread.join()
    assert overlapped == [False]


def test_training_does_not_wait_for_an_alert_that_hangs():
    inside, may_end = threading.Event(), threading.Event()

    class Stuck(Remembering):
        def alert(self, notice):
            inside.set()
            may_end.wait(60)

    tracker = Stuck()
    guard, told = guarded(tracker, busy_seconds=0.01)
    thread = threading.Thread(target=guard.alert, args=(None,))
    thread.start()
    inside.wait()
    for step in range(1, 10):
        guard.log(values(step))
    # The alert is still under way: a step that waited for it would never have returned.
    assert thread.is_alive()
    assert (guard.is_on, guard.missed, tracker.steps) == (False, 9, [])
    assert told[-1][0] == "tracker_failed"
    assert "off after 3 failures in a row: TimeoutError: has been busy with an alert" in told[-1][1]
    may_end.set()
    thread.join()
    guard.close()
    assert tracker.closed
