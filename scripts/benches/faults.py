"""The whole fault suite: what a run survives, in figures. `--scale 0.1` runs a tenth of it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "faults"))

from fault_bytes import flip_bits, flip_documents, truncate_journal, truncate_parts  # noqa: E402
from fault_injection import run_injection  # noqa: E402
from fault_kill import run_kills  # noqa: E402
from fault_rollbacks import run_rollbacks  # noqa: E402

Figures = dict[str, Any]


def _readers(folder: Path, count: int) -> Figures:
    """Partial readers during writing: the test of the quick suite with another number."""
    test = "test_faults_processes.py::test_a_thousand_readers_see_whole_steps_and_disturb_nobody"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=3000",
        str(ROOT / "tests/faults" / test),
    ]
    done = subprocess.run(
        command, env={**os.environ, "LOOPSCOPE_READERS": str(count)}, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
    return {"readers": count, "wrong": int(done.returncode != 0)}


def suite(scale: float, seed: int) -> dict[str, Callable[[Path], Figures]]:
    """Name → what runs it."""

    def n(full: int) -> int:
        return max(2, round(full * scale))

    return {
        "kill -9": lambda d: run_kills(d, cycles=n(1000), seed=seed),
        "truncated journal": lambda d: truncate_journal(d, steps=8, stride=max(1, round(1 / scale))),
        "truncated parts": lambda d: truncate_parts(d, steps=20, cuts=n(200), seed=seed),
        "bit flips": lambda d: flip_bits(d, steps=20, flips=n(10_000), seed=seed),
        "bit flips, documents": lambda d: flip_documents(d, stride=max(1, round(1 / scale))),
        "disk errors": lambda d: run_injection(d, stride=max(1, round(1 / scale))),
        "rollbacks": lambda d: run_rollbacks(d, histories=n(200), seed=seed),
        "readers while writing": lambda d: _readers(d, n(1000)),
    }


def main() -> int:
    """Run, print, and exit with 1 where a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the whole suite")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--only", nargs="*", help="names of parts to run")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    # Thousands of small files; a kill of the process is no different in memory.
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    results: dict[str, Figures] = {}
    for name, run in suite(arguments.scale, arguments.seed).items():
        if arguments.only and name not in arguments.only:
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(dir=base, prefix="loopscope-faults-") as folder:
            figures = run(Path(folder))
        for example in figures.pop("examples", ()):
            print("example:", json.dumps(example)[:1000], file=sys.stderr)
        results[name] = {**figures, "seconds": round(time.monotonic() - begun, 1)}
        print(f"{name:<24}" + "  ".join(f"{k} {v}" for k, v in results[name].items()), flush=True)
    print(json.dumps(results))
    return 1 if _missed(results) else 0


_GOALS = {
    "lost": 0, "doubled": 0, "wrong": 0, "unreadable": 0, "silently_wrong": 0, "missing_unnamed": 0, "unnamed": 0,
    "uncounted": 0, "exceptions": 0, "unaccounted": 0, "unreported": 0, "wrong_live": 0, "stale": 0, "sql": 0,
    "problems": 0, "not_well": 0,
    "worst_loss": 1,
}  # fmt: skip


def _missed(results: dict[str, Figures]) -> list[str]:
    missed = [
        f"{name}: {key} is {figures[key]}, the goal is at most {goal}"
        for name, figures in results.items()
        for key, goal in _GOALS.items()
        if figures.get(key, 0) > goal
    ]
    for line in missed:
        print(line, file=sys.stderr)
    return missed


if __name__ == "__main__":
    sys.exit(main())
