"""kill -9 in the middle of writing, rotating and sealing: nothing acknowledged is lost, nothing is doubled."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fault_rows import POSITIONS, wrong_rows

from loopscope.store import RunReader
from loopscope.store.read.verify import verify_run

_CHILD = Path(__file__).with_name("fault_child.py")
CYCLES_PER_RUN = 8


class Nursery:
    """Starts writers and kills them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_CHILD.parent), *filter(None, sys.path)]),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def kill_after(self, order: dict[str, Any], seconds: float) -> tuple[int | None, int | None, bool]:
        """Run an order, kill its process `seconds` after it claimed. (attempt, last acknowledged step, killed)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pipe = self._folder / "acknowledge"
        os.mkfifo(pipe)
        self._process.stdin.write(json.dumps({**order, "pipe": str(pipe)}) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        fd = os.open(pipe, os.O_RDONLY)
        data, started = b"", None
        killed = False
        while True:
            left = None if started is None else max(0.0, started + seconds - time.monotonic())
            ready, _, _ = select.select([fd], [], [], left)
            if not ready and not killed:
                os.kill(pid, signal.SIGKILL)
                killed, started = True, None
                continue
            block = os.read(fd, 1 << 16)
            if not block:
                break
            data += block
            if started is None and not killed:
                started = time.monotonic()
        os.close(fd)
        pipe.unlink()
        self._process.stdout.readline()
        words = data.decode().split()
        attempt = int(words[0][1:]) if words and words[0].startswith("a") else None
        steps = [int(w) for w in words if w.isdigit()]
        return attempt, (steps[-1] if steps else None), killed

    def close(self) -> None:
        assert self._process.stdin is not None
        with self._process:
            self._process.stdin.close()


def run_kills(folder: Path, *, cycles: int, seed: int) -> dict[str, Any]:
    """`cycles` kills over as many attempts, `CYCLES_PER_RUN` to a run; the run is read after every kill."""
    generator = random.Random(seed)
    nursery = Nursery(folder)
    figures = {
        "cycles": 0, "killed": 0, "killed_sealing": 0, "acknowledged": 0, "lost": 0, "doubled": 0, "wrong": 0,
        "unreadable": 0, "problems": 0, "not_well": 0, "notes": 0,
    }  # fmt: skip
    try:
        while figures["cycles"] < cycles:
            root = folder / "run"
            _one_run(root, nursery, generator, figures, min(CYCLES_PER_RUN, cycles - figures["cycles"]))
            shutil.rmtree(root, ignore_errors=True)
    finally:
        nursery.close()
    return figures


def _one_run(
    root: Path, nursery: Nursery, generator: random.Random, figures: dict[str, int], cycles: int
) -> None:
    acknowledged, parent = 0, None
    for cycle in range(cycles):
        figures["cycles"] += 1
        if cycle and generator.random() < 0.25 and any((root / "journal").glob("*.wal")):
            _, _, killed = nursery.kill_after({"kind": "seal", "root": str(root)}, generator.uniform(0, 0.03))
            figures["killed_sealing"] += killed
        else:
            order = {
                "kind": "write", "root": str(root), "new": cycle == 0, "first_step": acknowledged + 1,
                "parent": parent, "steps": 400, "rotate_bytes": generator.choice([8000, 30_000, 100_000, 10**8]),
            }  # fmt: skip
            attempt, last, killed = nursery.kill_after(order, generator.uniform(0, 0.05))
            if attempt is None:
                raise RuntimeError("the writer did not start")
            if last is not None:
                figures["acknowledged"] += last - acknowledged
                acknowledged, parent = last, attempt
            elif parent is None:
                parent = attempt
        figures["killed"] += killed
        _check(root, acknowledged, figures)


def _check(root: Path, acknowledged: int, figures: dict[str, int]) -> None:
    try:
        reader = RunReader(root)
        loss, router = reader.read("loss"), reader.read("router")
        figures["problems"] += len(reader.check_all())
        # An honest crash is nothing wrong, wherever it came.
        verified = verify_run(root)
        figures["not_well"] += len(verified.problems)
        figures["notes"] += len(verified.notes)
    except Exception:
        figures["unreadable"] += 1
        return
    seen: Counter[tuple[int, int]] = Counter((s, -1) for s in loss["step"].to_pylist())
    seen += Counter(zip(router["step"].to_pylist(), router["unrolled_pos"].to_pylist(), strict=True))
    expected = {(s, p) for s in range(1, acknowledged + 1) for p in range(-1, POSITIONS)}
    figures["lost"] += len(expected - seen.keys())
    figures["doubled"] += sum(n - 1 for n in seen.values())
    figures["wrong"] += len(wrong_rows("loss", loss)) + len(wrong_rows("router", router))
