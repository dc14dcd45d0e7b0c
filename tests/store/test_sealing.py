"""Sealing while training goes on: in a process, in a thread, and after the process that should have done it died."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from store_runs import loss, wait_for, write_attempt

from loopscope.store import RunReader, RunStore, StoreOptions
from loopscope.store.disk import Disk
from loopscope.store.seal_run import seal_run
from loopscope.store.verify import verify_run


@pytest.mark.parametrize("seal_in", ["process", "thread"])
def test_journals_are_sealed_in_the_background(tmp_path: Path, seal_in: str) -> None:
    root = tmp_path / "run"
    options = StoreOptions(on_error="raise", tick_s=0.02, rotate_bytes=4000, seal_in=seal_in)  # type: ignore[arg-type]
    store = RunStore.create(root, options=options)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, 201):
        writer.append("loss", loss(step))
    wait_for(lambda: len(list(root.glob("journal/*.wal"))) <= 1)
    assert len(list(root.glob("tables/loss/part-*.parquet"))) > 2
    assert RunReader(root).read("loss")["step"].to_pylist() == list(range(1, 201))
    store.close()
    assert store.seal_failures == 0
    assert verify_run(root).problems == []


class Stuck(Disk):
    """Its first fsync in a thread of the test takes as long as the test wants."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def fsync(self, fd: int) -> None:
        if threading.current_thread().name == "background" and not self.entered.is_set():
            self.entered.set()
            assert self.go.wait(60)
        super().fsync(fd)


@pytest.mark.parametrize("end", ["flush", "close"])
def test_who_wants_rows_durable_waits_for_the_journal_that_another_thread_is_at(
    tmp_path: Path, end: str
) -> None:
    disk = Stuck()
    options = StoreOptions(on_error="raise", tick_s=3600.0, rotate_bytes=3000)
    store = RunStore.create(tmp_path / "run", options=options, disk=disk)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, 101):
        writer.append("loss", loss(step))
    background = threading.Thread(target=writer.tick, name="background")
    background.start()
    assert disk.entered.wait(60)
    done = threading.Event()
    finish = (lambda: writer.flush(durable=True)) if end == "flush" else writer.close
    ending = threading.Thread(target=lambda: (finish(), done.set()))
    ending.start()
    assert not done.wait(0.2)
    disk.go.set()
    ending.join(60)
    background.join(60)
    assert done.is_set()
    announced = sorted(path.name for path in (tmp_path / "run" / "journal").glob("*.wal"))
    if end == "close":
        assert announced == []  # sealed, all of them
    else:
        assert store._keeper.take_waiting("") == announced[:-1]
    store.close()
    assert verify_run(tmp_path / "run").problems == []


def test_a_journal_is_sealed_when_it_is_old(tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = StoreOptions(on_error="raise", tick_s=0.02, rotate_s=0.05, seal_in="thread")
    with RunStore.create(root, options=options) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        writer.append("loss", loss(1))
        wait_for(lambda: bool(list(root.glob("tables/loss/part-*.parquet"))))
        writer.append("loss", loss(2))
    assert RunReader(root).read("loss")["step"].to_pylist() == [1, 2]


def test_what_a_dead_attempt_left_is_sealed_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 6), seal=False)
    options = StoreOptions(tick_s=0.02, seal_in="thread")
    with RunStore.open(root, options=options) as store:
        store.claim_attempt(first_step=4, parent_attempt=1)
        wait_for(lambda: not list(root.glob("journal/*.wal")))
    assert RunReader(root).read("loss").num_rows == 5
    assert verify_run(root).problems == []


def test_sealing_that_fails_is_counted_and_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = StoreOptions(tick_s=0.02, rotate_bytes=2000, seal_in="thread", retry_s=0.05)
    store = RunStore.create(root, options=options)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    # A file where the table's folder should be.
    (root / "tables" / "loss").write_text("in the way")
    for step in range(1, 41):
        writer.append("loss", loss(step))
    wait_for(lambda: store.seal_failures > 1)
    assert "loss" in (store.last_error or "")
    (root / "tables" / "loss").unlink()
    wait_for(lambda: len(list(root.glob("journal/*.wal"))) <= 1)
    store.close()
    assert writer.dropped == 0
    assert RunReader(root).read("loss").num_rows == 40


def test_rows_reach_the_disk_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd))[1])
    options = StoreOptions(tick_s=0.02, fsync_s=0.05)
    with RunStore.create(tmp_path / "run", options=options) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        before = len(synced)
        writer.append("loss", loss(1))
        assert len(synced) == before
        wait_for(lambda: len(synced) > before, 5)
        time.sleep(0.2)
        settled = len(synced)
        time.sleep(0.3)
        assert len(synced) == settled, "nothing new, nothing to sync"


def test_old_temporary_files_are_swept(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 3))
    for name, age in (("old.tmp", 7200), ("new.tmp", 0)):
        path = root / "journal" / name
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    seal_run(root)
    assert [p.name for p in root.glob("journal/*.tmp")] == ["new.tmp"]
