"""Sealing while training goes on: in a process, in a thread, and after the process that should have done it died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from store_runs import loss, wait_for, write_attempt

import loopscope.store.seal.seal_run as seal_module
from loopscope.store import Remote, RunReader, RunStore, StoreOptions
from loopscope.store.disk import Disk
from loopscope.store.ids import this_process
from loopscope.store.locks import Holder
from loopscope.store.read.verify import verify_run
from loopscope.store.seal.seal_run import AbandonedWriters, seal_run
from loopscope.store.seal.sealer import seal_all


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
        assert store._background.take_waiting("") == announced[:-1]
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


_KILLED = """
import os, sys
from loopscope.store import RunStore
store = RunStore.create(sys.argv[1])
writer = store.writer(attempt=store.claim_attempt(first_step=1))
for step in range(1, 6):
    writer.append("loss", {"step": step, "aggregation_scope": "global"})
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_attempt_left_is_sealed_and_copied_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "run"
    subprocess.run([sys.executable, "-c", _KILLED, str(root)], check=False)
    assert list(root.glob("journal/00001-r0.*.lock"))
    with RunStore.open(root, options=StoreOptions(tick_s=0.02)) as store:
        store.mirror_to(Remote.of((tmp_path / "copy").as_uri()))
        writer = store.writer(attempt=store.claim_attempt(first_step=4, parent_attempt=1))
        writer.append("loss", loss(4))
    for folder in (root, tmp_path / "copy"):
        assert not list(folder.glob("journal/*.wal"))
        assert RunReader(folder).read("loss")["step"].to_pylist() == [1, 2, 3, 4]
        assert verify_run(folder).problems == []


def locked_elsewhere(root: Path, name: str) -> Path:
    """A lock of a process on a machine that cannot be asked."""
    elsewhere = msgspec.structs.replace(this_process(), host="another-machine")
    holder = Holder(process=elsewhere, started=datetime.now(UTC), run_id="it")
    path = root / "journal" / f"{name}.1.lock"
    path.write_bytes(msgspec.json.encode(holder))
    return path


def test_what_an_attempt_on_another_machine_left_is_sealed_once_it_stops_to_beat(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 6), seal=False)
    lock = locked_elsewhere(root, "00001-r0")
    announced: list[str] = []
    abandoned = AbandonedWriters(root / "journal", 2, 0.2, announced.append)
    for beat in range(5):
        os.utime(lock, (beat, beat))
        abandoned()
        time.sleep(0.1)
        assert announced == []
    wait_for(lambda: abandoned() is None and bool(announced))
    assert announced == ["00001-r0-00001.wal"]


@pytest.mark.parametrize("beats", [True, False])
def test_seal_watches_a_writer_on_another_machine(
    tmp_path: Path, beats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 6), seal=False)
    lock = locked_elsewhere(root, "00001-r0")
    monkeypatch.setattr(seal_module, "GRACE_S", 0.3)

    def look(seconds: float) -> None:
        time.sleep(seconds / 10)
        if beats:
            os.utime(lock, ns=(0, time.monotonic_ns()))

    monkeypatch.setattr(seal_module, "time", SimpleNamespace(sleep=look))
    report = seal_run(root)
    assert report.busy == (["00001-r0-00001.wal"] if beats else [])
    assert len(report.sealed) == (not beats)


class Paused(Disk):
    """Stops in the middle of the first Parquet file that it writes."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def write(self, fd: int, data: bytes) -> int:
        taken = super().write(fd, data[: len(data) // 2 + 1])
        self.entered.set()
        assert self.go.wait(60)
        return taken


def test_two_sealers_of_one_journal_spoil_nothing(tmp_path: Path) -> None:
    """`loopscope seal` beside a training that has just rotated its journal."""
    root = tmp_path / "run"
    write_attempt(root, range(1, 101), seal=False)
    name = next(root.glob("journal/*.wal")).name
    slow = Paused()
    failures: list[str] = []
    thread = threading.Thread(target=lambda: failures.extend(seal_all(root, [name], disk=slow)))
    thread.start()
    assert slow.entered.wait(60)
    assert seal_all(root, [name]) == []
    assert verify_run(root).problems == []
    slow.go.set()
    thread.join(60)
    assert failures == []
    assert verify_run(root).problems == []
    assert RunReader(root).read("loss").num_rows == 100
    assert not list(root.glob("journal/*.tmp"))


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


class Recording(Disk):
    """Remembers what was made durable."""

    def __init__(self) -> None:
        self.synced: list[str] = []

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        self.synced.append(f"{path.name}/")


def test_a_durable_row_is_in_a_file_whose_name_is_durable_too(tmp_path: Path) -> None:
    disk = Recording()
    options = StoreOptions(on_error="raise", tick_s=3600.0)
    with RunStore.create(tmp_path / "run", options=options, disk=disk) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        for step in (1, 2):
            disk.synced.clear()
            writer.append("loss", loss(step))
            writer.flush(durable=True)
            # Once per file is enough.
            assert disk.synced == ["00001-r0-00001.wal", "journal/"][: 3 - step]


def test_old_temporary_files_are_swept(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 3))
    for name, age in (("old.tmp", 7200), ("new.tmp", 0)):
        path = root / "journal" / name
        path.write_text("")
        os.utime(path, (time.time() - age,) * 2)
    seal_run(root)
    assert [p.name for p in root.glob("journal/*.tmp")] == ["new.tmp"]
