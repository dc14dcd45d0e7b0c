"""Starting the ranks: exit statuses, signals, and what the terminal shows."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from loopscope.cli import torchrun
from loopscope.cli.torchrun import run_ranks, torchrun_command


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch):
    """Replaces torchrun by a piece of Python."""

    def install(code: str) -> None:
        monkeypatch.setattr(torchrun, "torchrun_command", lambda *_, **__: [sys.executable, "-c", code])

    return install


def _run(out: Path) -> int:
    return run_ranks([], ranks=1, steps=3, environment=os.environ, out=out)


@pytest.mark.parametrize(("code", "status"), [(0, 0), (1, 1), (2, 2), (7, 1)])
def test_status(code: int, status: int, stub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stub(f"import sys; print('from a rank'); sys.exit({code})")
    assert _run(tmp_path) == status
    captured = capfd.readouterr()
    assert captured.out == "from a rank\n"
    assert ("logs" in captured.err) == (status != 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(
    number: int, stub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ready, got = tmp_path / "ready", tmp_path / "got"
    stub(
        "import signal, sys, time, pathlib\n"
        f"def stop(number, frame): pathlib.Path({str(got)!r}).write_text(str(number)); sys.exit(3)\n"
        f"signal.signal({int(number)}, stop)\n"
        f"pathlib.Path({str(ready)!r}).write_text('')\n"
        "time.sleep(60)"
    )

    def send() -> None:
        for _ in range(600):
            if ready.exists():
                break
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    sender = threading.Thread(target=send)
    sender.start()
    assert _run(tmp_path) == 128 + number
    sender.join()
    assert got.read_text() == str(int(number))
    assert signal.getsignal(number) is before
    assert signal.Signals(number).name in capfd.readouterr().err


def test_the_command_keeps_every_ranks_output(tmp_path: Path) -> None:
    command = torchrun_command(["--config", "debug"], ranks=2, log_dir=tmp_path)
    assert command[0] == sys.executable
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[command.index("--log-dir") + 1] == str(tmp_path)
    assert command[-2:] == ["--config", "debug"]


@pytest.mark.parametrize(
    "line", ["step: 12  loss:  3.1", "\x1b[31mstep: 12  \x1b[32mloss", "x - step:\x1b[0m 12"]
)
def test_a_step_is_read_from_torchtitans_line(line: str) -> None:
    match = torchrun._STEP.search(line)
    assert match is not None
    assert match.group(1) == "12"


def test_status_of_the_job() -> None:
    from loopscope.integrations.torchtitan.torchrun import exit_status

    assert exit_status([2, -15]) == 2
    assert exit_status([1]) == 1
    assert exit_status([-9, 1]) == 1
