"""Rows of ours in a W&B run that somebody else logs to: against a model of W&B's steps, and against W&B itself."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracker_helpers import history

from loopscope.trackers.shared_rows import SharedRows


class Steps:
    """How W&B keeps its open row, as its own code says; `rows` are the closed ones."""

    def __init__(self, step=0):
        self.step, self.open, self.rows, self.thrown_away = step, {}, [], 0

    def log(self, data, step=None, commit=None):
        if step is not None:
            if step < self.step:
                self.thrown_away += 1
                return
            if step > self.step:
                self._close(step)
        self.open.update(data)
        if commit or (commit is None and step is None):
            self._close(self.step + 1)

    def _close(self, following):
        if self.open:
            self.rows.append({**self.open, "_step": self.step})
        self.step, self.open = following, {}

    def finish(self):
        self._close(self.step + 1)
        return self.rows


def ours(step, **more):
    return {"loopscope/step": step, "x": step / 2, **more}


def check(rows, put, owner_steps, *, in_time=True):
    """Every row of ours once, `in_time` beside no row of the owner but that of its step; every row of the owner."""
    found = [row for row in rows if "loopscope/step" in row]
    assert Counter(row["loopscope/step"] for row in found) == Counter(put)
    assert all(row["x"] == row["loopscope/step"] / 2 for row in found)
    if in_time:
        assert all(row["owner"] == row["loopscope/step"] for row in found if "owner" in row)
    assert [row["owner"] for row in rows if "owner" in row] == owner_steps


@given(
    log_every=st.integers(1, 12),
    trace_every=st.integers(1, 7),
    steps=st.integers(1, 40),
    late=st.integers(0, 8),
    order=st.booleans(),
)
def test_rows_of_a_trainer_that_logs_with_its_step(log_every, trace_every, steps, late, order):
    run = Steps()
    shared = SharedRows(run)
    put, owner, queue = [], [], []
    for step in range(1, steps + 1):
        if step % trace_every == 0:
            queue.append(step)
        logs = step == 1 or step % log_every == 0
        if logs and order:
            run.log({"owner": step}, step=step)
            owner.append(step)
        # Losses come some steps late, and all that is due when the trainer logs.
        while queue and (logs or queue[0] <= step - late):
            put.append(queue.pop(0))
            shared.put(put[-1], ours(put[-1]))
        if logs and not order:
            run.log({"owner": step}, step=step)
            owner.append(step)
    shared.finish()
    # A late row that comes after the owner's row of a later step finds its place beside some row.
    check(run.finish(), put, owner, in_time=not order or late == 0)
    assert run.thrown_away == shared.lost == 0


@given(calls=st.lists(st.integers(0, 3), min_size=1, max_size=30), start=st.integers(0, 20))
def test_rows_beside_an_owner_that_lets_wandb_count(calls, start):
    run = Steps(start)
    shared = SharedRows(run)
    owner = 0
    for step, number in enumerate(calls, 1):
        shared.put(step, ours(step))
        for _ in range(number):
            run.log({"count": owner})
            owner += 1
    shared.finish()
    rows = run.finish()
    assert Counter(row["loopscope/step"] for row in rows if "loopscope/step" in row) == Counter(
        range(1, len(calls) + 1)
    )
    assert [row["count"] for row in rows if "count" in row] == list(range(owner))
    assert run.thrown_away == 0


def test_after_a_resume_into_the_same_run_the_owners_rows_are_not_thrown_away_for_longer():
    alone, run = Steps(100), Steps(100)
    shared = SharedRows(run)
    for step in range(91, 131):
        shared.put(step, ours(step))
        if step % 5 == 0:
            for each in (alone, run):
                each.log({"owner": step}, step=step)
    shared.finish()
    assert run.thrown_away == alone.thrown_away == 1
    rows, without = run.finish(), alone.finish()
    assert sorted(row["loopscope/step"] for row in rows if "loopscope/step" in row) == list(range(91, 131))
    assert [row["owner"] for row in rows if "owner" in row] == [row["owner"] for row in without]


def test_values_of_a_step_that_come_twice_are_in_one_row_while_it_is_open():
    run = Steps(4)
    shared = SharedRows(run)
    shared.put(5, ours(5))
    shared.put(5, ours(5, probe=1))
    shared.finish()
    rows = [row for row in run.finish() if row.get("loopscope/step") == 5]
    assert {key for row in rows for key in row} == {"loopscope/step", "x", "probe", "_step"}


def test_more_waiting_rows_than_there_is_room_for_are_counted(monkeypatch):
    monkeypatch.setattr("loopscope.trackers.shared_rows.MOST_WAITING", 3)
    run = Steps(1000)
    shared = SharedRows(run)
    for step in range(1, 8):
        shared.put(step, ours(step))
    assert shared.lost > 0
    shared.finish()
    assert shared.lost + sum("loopscope/step" in row for row in run.finish()) == 7


@pytest.mark.parametrize("log_every", [1, 3])
def test_wandb_itself_agrees_with_the_model(tmp_path, log_every):
    import wandb

    run = wandb.init(project="shared", dir=str(tmp_path))
    model = Steps()
    both = [SharedRows(run), SharedRows(model)]
    for step in range(1, 11):
        for shared in both:
            shared.put(step, ours(step))
        if step == 1 or step % log_every == 0:
            for target in (run, model):
                target.log({"owner": step}, step=step)
    for shared in both:
        shared.finish()
    run.finish()
    found = [row for row in history(tmp_path) if len(row) > 1]
    assert found == model.finish()
    check(found, range(1, 11), [s for s in range(1, 11) if s == 1 or s % log_every == 0])
