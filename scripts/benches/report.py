"""The report of a long run: seconds, memory and bytes. 100,000 steps, traced every 10th at 34 visits."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "report"))

from report_runs import Shape, generated_run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--experts", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = Shape(
            steps=given.steps,
            every=given.every,
            loops=8,
            layers=4,
            experts=given.experts,
            top_k=8,
            tokens=8192,
        )
        run = generated_run(Path(folder) / "long", shape)
        out = Path(folder) / "report.html"
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "loopscope.cli", "report", str(run), "-o", str(out)], check=True
        )
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = {
            "steps": given.steps,
            "visits": 34,
            "seconds": round(time.perf_counter() - begun, 2),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
            "peak_mb": round(used.ru_maxrss / 1024),
            "megabytes": round(out.stat().st_size / 1e6, 2),
        }
    for name, value in found.items():
        print(f"{name:<12} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
