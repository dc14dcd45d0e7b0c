"""Signals, forks, clocks, folders that go away, and readers that look while rows are being written."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fault_rows import POSITIONS, loss_row, write_step, wrong_rows

from loopscope.analysis import open_run
from loopscope.errors import ConfigError, RunExistsError, StoreError
from loopscope.store import RunReader, RunStore, StoreOptions

QUIET = StoreOptions(tick_s=3600.0)
_HERE = str(Path(__file__).parent)


def _start(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([_HERE, *filter(None, sys.path)])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip


_WRITE_FOR_EVER = """
import sys, time
from pathlib import Path
from fault_rows import write_step
from loopscope.store import RunStore
store = RunStore.create(Path(sys.argv[1]))
writer = store.writer(attempt=store.claim_attempt(first_step=1))
step = 0
while True:
    step += 1
    write_step(writer, step)
    print(step, flush=True)
    time.sleep(0.001)
"""


def test_pre_emption_loses_no_row(fast_tmp: Path) -> None:
    """SIGTERM with no handler at all: what was taken is with the kernel already, nothing needs flushing."""
    with _start(_WRITE_FOR_EVER, str(fast_tmp / "run")) as process:
        assert process.stdout is not None
        for _ in range(50):
            last = process.stdout.readline()
        process.terminate()
        begun = time.monotonic()
        last = (process.stdout.read().split() or [last])[-1]
        assert process.wait() == -signal.SIGTERM
        assert time.monotonic() - begun < 5
    assert open_run(fast_tmp / "run").arrow("loss").num_rows >= int(last)


def test_flush_durable_works_from_a_signal_handler_time_budget(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        for step in range(1, 2001):
            write_step(writer, step)
        begun = time.monotonic()
        writer.flush(durable=True)
        assert time.monotonic() - begun < 5
        assert writer.dropped == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_never_writes(fast_tmp: Path) -> None:
    with RunStore.create(fast_tmp / "run", options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        write_step(writer, 1)
        child = os.fork()
        if child == 0:
            try:
                write_step(writer, 2)
                writer.flush(durable=True)
                writer.close()
                store.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        write_step(writer, 2)
        assert writer.attempted == 2 * (1 + POSITIONS)
    run = open_run(fast_tmp / "run")
    assert run.arrow("loss")["step"].to_pylist() == [1, 2]
    assert run.problems == []


def test_a_clock_that_jumps_breaks_nothing(fast_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([0.0, 1e9, -2e9, 5e8] * 1000)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() + next(jumps)))
    monkeypatch.setattr(time, "time_ns", lambda: int(max(0.0, real() + next(jumps)) * 1e9))
    with RunStore.create(fast_tmp / "run", options=StoreOptions(tick_s=0.01, fsync_s=0.01)) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        for step in range(1, 51):
            write_step(writer, step)
            time.sleep(0.001)
        assert writer.dropped == 0
    assert open_run(fast_tmp / "run").arrow("loss")["step"].to_pylist() == list(range(1, 51))


def test_a_folder_that_cannot_be_written_is_refused_at_start(fast_tmp: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        RunStore.create("/proc/loopscope-run")
    (fast_tmp / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        RunStore.create(fast_tmp / "file")


@pytest.mark.filterwarnings("ignore")
def test_a_folder_deleted_under_the_run_costs_rows_and_says_so(
    fast_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = fast_tmp / "run"
    store = RunStore.create(root, options=QUIET)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    write_step(writer, 1)
    shutil.rmtree(root)
    write_step(writer, 2)
    writer.tick()
    write_step(writer, 3)
    store.close()
    assert writer.attempted == writer.dropped == 3 * (1 + POSITIONS)
    assert not root.exists()
    assert next(r.levelno for r in caplog.records if "deleted" in r.getMessage()) == logging.CRITICAL


def test_a_thousand_readers_see_whole_steps_and_disturb_nobody(fast_tmp: Path) -> None:
    root = fast_tmp / "run"
    options = StoreOptions(tick_s=0.005, seal_in="thread", rotate_bytes=60_000)
    store = RunStore.create(root, options=options)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    stop = threading.Event()
    steps = 0

    def write() -> None:
        nonlocal steps
        while not stop.is_set():
            steps += 1
            write_step(writer, steps)
            # Every look reads the whole run: many looks need a run that grows slowly.
            time.sleep(0.004 if readers < 100 else 0.04)

    readers = int(os.environ.get("LOOPSCOPE_READERS", "60"))
    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    try:
        for _ in range(readers):
            before = steps
            reader = RunReader(root)
            rows = reader.read("loss")
            found = rows["step"].to_pylist()
            # Every step that was complete before the look, each once, and none invented.
            assert sorted(found) == list(range(1, len(found) + 1))
            assert len(found) >= before - 1
            assert not wrong_rows("loss", rows)
            assert [p for p in reader.check_all() if p.lost_rows] == []
            seen += 1
    finally:
        stop.set()
        thread.join()
        store.close()
    assert seen == readers
    assert writer.dropped == 0
    assert open_run(root).arrow("loss").num_rows == steps


def test_a_second_run_on_one_folder_is_refused_with_the_owners_name(fast_tmp: Path) -> None:
    root = fast_tmp / "run"
    with _start(_WRITE_FOR_EVER, str(root)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        run_id = RunReader(root).manifest.run_id
        with pytest.raises(RunExistsError) as refused:
            RunStore.create(root)
        assert run_id in str(refused.value)
        assert f"pid {process.pid}" in str(refused.value)
        with pytest.raises(RunExistsError, match=f"pid {process.pid}, started 20"):
            RunStore.open(root, options=QUIET).claim_attempt(first_step=1)
        with pytest.raises(RunExistsError, match=f"pid {process.pid}, started 20"):
            RunStore.open(root, options=QUIET).writer(attempt=1)
        process.kill()
        process.wait()
        # Its lock is stale now, and taken over at once.
        with RunStore.open(root, options=QUIET) as store:
            attempt = store.claim_attempt(first_step=1)
            assert attempt.attempt == 2
            store.writer(attempt=attempt).append("loss", loss_row(1))
    assert open_run(root).arrow("loss")["attempt"].to_pylist() == [2]


def test_of_many_processes_that_take_over_exactly_one_wins(fast_tmp: Path) -> None:
    root = fast_tmp / "run"
    with _start(_WRITE_FOR_EVER, str(root)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    code = """
import sys, time
from loopscope.errors import RunExistsError
from loopscope.store import RunStore
sys.stdin.readline()
store = RunStore.open(sys.argv[1])
try:
    print(store.claim_attempt(first_step=1).attempt, flush=True)
    sys.stdin.readline()
except RunExistsError:
    print("refused", flush=True)
"""
    processes = [_start(code, str(root)) for _ in range(4)]
    answers = []
    try:
        for p in processes:
            assert p.stdin is not None
            p.stdin.write("go\n")
            p.stdin.flush()
        for p in processes:
            assert p.stdout is not None
            answers.append(p.stdout.readline().strip())
    finally:
        for p in processes:
            with p:
                assert p.stdin is not None
                p.stdin.close()
    assert sorted(answers) == ["2", "refused", "refused", "refused"]


def test_a_closed_writer_takes_no_row(fast_tmp: Path) -> None:
    store = RunStore.create(fast_tmp / "run", options=StoreOptions(on_error="raise"))
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    store.close()
    with pytest.raises(StoreError, match="closed"):
        writer.append("loss", loss_row(1))
    writer.close()
