"""Writers compared on one stream of numbers, interleaved; and with `--at-scale`, runs of 10^7 and 10^8 rows."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

LIB = Path(__file__).resolve().parent / "lib"
sys.path.insert(0, str(LIB))

from store_scale import measure_scale  # noqa: E402
from store_writers import WRITERS  # noqa: E402


def _child(name: str, folder: Path, steps: int, seed: int, *, kill: bool) -> dict[str, Any] | None:
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        str(LIB / "store_child.py"),
        name,
        str(folder),
        str(steps),
        str(seed),
        str(int(kill)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(f"{name} failed: {done.stderr[-800:]}", file=sys.stderr)
        return None
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def _read_ms(name: str, folder: Path, steps: int) -> float:
    kind = WRITERS[name][0]
    kind.history(folder)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        found = kind.history(folder)
        times.append(time.perf_counter() - begun)
    assert len(found) == steps, (name, len(found), steps)
    return min(times) * 1e3


def compare(names: list[str], steps: int, repeats: int, base: Path) -> dict[str, dict[str, float]]:
    """Every writer, `repeats` times, in turn."""
    times: dict[str, list[list[float]]] = {n: [] for n in names}
    # Processor time of the training thread alone: what the wall clock says on a machine with nothing else to do.
    own: dict[str, list[float]] = {n: [] for n in names}
    figures: dict[str, dict[str, float]] = {}
    for repeat in range(repeats):
        for name in names:
            folder = base / f"{name}-{repeat}"
            answer = _child(name, folder, steps, repeat, kill=False)
            if answer is None:
                continue
            times[name].append(answer["times_us"])
            own[name] += answer["own_us"]
            if repeat == repeats - 1:
                figures[name] = {
                    "megabytes": _bytes(folder) / 1e6,
                    "history_ms": _read_ms(name, folder, steps),
                }
            shutil.rmtree(folder)
    for name in figures:
        folder = base / f"{name}-killed"
        if _child(name, folder, min(steps, 1003), 0, kill=True) is not None:
            try:
                kept = len(WRITERS[name][0].history(folder))
            except Exception:  # noqa: BLE001 - an unreadable file has lost everything
                kept = 0
            figures[name]["steps_lost"] = min(steps, 1003) - kept
        shutil.rmtree(folder, ignore_errors=True)
        values = np.array(times[name])
        figures[name] |= {
            "step_us_min": float(values.mean(axis=1).min()), "step_us_median": float(np.median(values.mean(axis=1))),
            "median_us": float(np.median(values)),
            "p999_us": float(np.quantile(values, 0.999)),
            "own_p999_us": float(np.quantile(np.array(own[name]), 0.999)), "max_us": float(values.max()),
        }  # fmt: skip
    return figures


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000, help="steps per writer and repeat")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats")
    parser.add_argument("--only", nargs="*", help="names of writers")
    parser.add_argument(
        "--at-scale", type=float, default=0.0, help="1 for 10^7 and 10^8 rows, 0.1 for a tenth"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; a temporary folder by default"
    )
    arguments = parser.parse_args()
    names = [n for n, (_, needs) in WRITERS.items() if needs is None or find_spec(needs) is not None]
    names = [n for n in names if arguments.only is None or n in arguments.only]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="loopscope-bench-") as folder:
        figures = compare(names, arguments.steps, arguments.repeats, Path(folder))
        columns = [
            "step_us_min",
            "median_us",
            "step_us_median",
            "p999_us",
            "own_p999_us",
            "max_us",
            "megabytes",
            "history_ms",
            "steps_lost",
        ]
        print(f"{'writer':<24}" + "".join(f"{c:>15}" for c in columns))
        for name, row in figures.items():
            print(f"{name:<24}" + "".join(f"{row.get(c, float('nan')):>15.1f}" for c in columns))
        results["writers"] = figures
        if "loopscope" in figures:
            ours = figures["loopscope"]
            for other in ("wandb offline", "TensorBoard", "JSON lines"):
                if other in figures:
                    theirs = figures[other]
                    ratio = {
                        "write_ratio": theirs["step_us_min"] / ours["step_us_min"],
                        "bytes_ratio": theirs["megabytes"] / ours["megabytes"],
                        "history_ratio": theirs["history_ms"] / ours["history_ms"],
                    }
                    results[f"against {other}"] = ratio
                    print(f"against {other:<16}" + "  ".join(f"{k} {v:.1f}" for k, v in ratio.items()))
        if arguments.at_scale:
            results["scale"] = measure_scale(Path(folder), arguments.at_scale)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
