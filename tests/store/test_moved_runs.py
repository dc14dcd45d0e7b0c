"""A run directory that is renamed, deleted, replaced or taken over while it is written."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import pytest
from store_runs import loss, wait_for

from loopscope.analysis import open_run
from loopscope.analysis.liveness import liveness
from loopscope.errors import SupersededError
from loopscope.store import RunReader, RunStore, StoreOptions
from loopscope.store.read.verify import verify_run

BUSY = StoreOptions(tick_s=0.02, fsync_s=0.02, rotate_bytes=4000, seal_in="thread", retry_s=0.1)


@pytest.mark.parametrize("seal_in", ["thread", "process"])
def test_a_run_that_is_renamed_again_and_again_is_one_run(tmp_path: Path, seal_in: str) -> None:
    here = tmp_path / "run0"
    options = StoreOptions(tick_s=0.02, fsync_s=0.02, rotate_bytes=4000, seal_in=seal_in, retry_s=0.1)  # type: ignore[arg-type]
    store = RunStore.create(here, options=options)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, 301):
        writer.append("loss", loss(step))
        if step % 60 == 0:
            time.sleep(0.1)
            there = tmp_path / f"elsewhere{step}" / "run"
            there.parent.mkdir()
            here = here.rename(there)
            assert store.path == there
            assert liveness(there) == "running"
    store.close()
    assert open_run(here).arrow("loss")["step"].to_pylist() == list(range(1, 301))
    assert verify_run(here).problems == []
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and here not in p.parents]
    assert (liveness(here), writer.dropped) == ("finished", 0)


def test_what_takes_the_old_place_is_another_run(tmp_path: Path) -> None:
    first = RunStore.create(tmp_path / "run", options=BUSY)
    one = first.writer(attempt=first.claim_attempt(first_step=1))
    one.append("loss", loss(1))
    (tmp_path / "run").rename(tmp_path / "old")
    second = RunStore.create(tmp_path / "run", options=BUSY)
    two = second.writer(attempt=second.claim_attempt(first_step=1))
    for step in range(2, 200):
        one.append("loss", loss(step))
        two.append("loss", loss(step + 1000))
    first.close()
    assert liveness(tmp_path / "run") == "running"
    second.close()
    assert open_run(tmp_path / "old").arrow("loss")["step"].to_pylist() == list(range(1, 200))
    assert open_run(tmp_path / "run").arrow("loss")["step"].to_pylist() == list(range(1002, 1200))


def test_the_old_place_is_not_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    store = RunStore.create(root, options=BUSY)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, 101):
        writer.append("loss", loss(step))
    wait_for(lambda: any(root.glob("tables/loss/*.parquet")))
    for _ in range(100):  # The background thread writes into it meanwhile.
        shutil.rmtree(root, ignore_errors=True)
        if not root.exists():
            break
    for step in range(101, 121):
        writer.append("loss", loss(step))
        time.sleep(0.01)
    store.close()
    assert not root.exists()
    assert writer.dropped == writer.attempted == 120
    assert any(r.levelno == logging.CRITICAL and "deleted" in r.getMessage() for r in caplog.records)


def test_rows_of_a_journal_that_somebody_sealed_are_not_lost(tmp_path: Path) -> None:
    from loopscope.store.seal.seal_journal import seal_journal

    store = RunStore.create(tmp_path / "run", options=StoreOptions(tick_s=3600.0))
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in (1, 2, 3):
        writer.append("loss", loss(step))
    seal_journal(tmp_path / "run", "00001-r0-00001.wal")
    time.sleep(0.06)
    writer.append("loss", loss(4))
    store.close()
    assert writer.dropped == 0
    assert open_run(tmp_path / "run").arrow("loss")["step"].to_pylist() == [1, 2, 3, 4]
    assert verify_run(tmp_path / "run").problems == []


@pytest.mark.parametrize("on_error", ["record", "raise"])
def test_a_trainer_that_was_overtaken_learns_it_at_its_next_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    from loopscope.store.ids import Process

    options = StoreOptions(tick_s=3600.0, grace_s=0.1, on_error=on_error)  # type: ignore[arg-type]
    first = RunStore.create(tmp_path / "run", options=options)
    slow = first.writer(attempt=first.claim_attempt(first_step=1))
    for step in range(1, 21):
        slow.append("loss", loss(step))
    with monkeypatch.context() as patch:
        patch.setattr(Process, "alive", lambda self: None)  # As from another host.
        second = RunStore.open(tmp_path / "run", options=options)
        fast = second.writer(attempt=second.claim_attempt(first_step=11, parent_attempt=1))
    fast.append("loss", loss(11, 2.0))
    if on_error == "raise":
        with pytest.raises(SupersededError, match="attempt 2"):
            slow.append("loss", loss(21))
    else:
        slow.append("loss", loss(21))
    assert slow.superseded_by == 2
    assert [r.levelno for r in caplog.records if "superseded" in r.getMessage()] == [logging.CRITICAL]
    first.close()
    assert liveness(tmp_path / "run") == "running"  # The first one closed what it no longer owns.
    fast.append("loss", loss(12, 2.0))
    second.close()
    assert liveness(tmp_path / "run") == "finished"
    reader = RunReader(tmp_path / "run")
    assert reader.read("loss")["step"].to_pylist() == list(range(1, 13))
    assert reader.read("loss", live=False).num_rows == 21 + 2
    events = reader.read("health", live=False).to_pylist()
    assert [(e["attempt"], e["event"], e["count"]) for e in events] == [(1, "superseded", 2)]
    assert slow.dropped == fast.dropped == 0


def test_a_lock_of_a_later_owner_is_not_given_back_by_an_earlier_one(tmp_path: Path) -> None:
    first = RunStore.create(tmp_path / "run", options=StoreOptions(tick_s=3600.0))
    owner = tmp_path / "run/journal/owner.1.lock"
    owner.unlink()
    second = RunStore.open(tmp_path / "run", options=StoreOptions(tick_s=3600.0))
    second.claim_attempt(first_step=1)
    assert owner.exists()
    first.close()
    assert owner.exists()
    second.close()
    assert not owner.exists()
    assert list((tmp_path / "run/journal").iterdir()) == []
