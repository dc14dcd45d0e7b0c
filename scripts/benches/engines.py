"""About 1,000,000 rows by the real writer, sealed and compacted, asked the same questions in every engine installed."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the engine tests at the given size; exit with 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows over the two runs")
    arguments = parser.parse_args()
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--durations=0", "--timeout=3000", "-p", "no:cacheprovider",
         str(ROOT / "tests" / "engines")],
        env={**os.environ, "LOOPSCOPE_ENGINE_ROWS": str(arguments.rows)}, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    outcomes = re.findall(r"::(test_\w+(?:\[\w+\])?) (PASSED|FAILED|SKIPPED|ERROR)", done.stdout)
    seconds = {
        (phase, test): float(s)
        for s, phase, test in re.findall(r"([\d.]+)s (setup|call) +\S+::(test_\w+(?:\[\w+\])?)", done.stdout)
    }
    figures = {}
    for test, outcome in outcomes:
        figures[test] = {"outcome": outcome, "seconds": seconds.get(("call", test), 0.0)}
        print(f"{test:<56}{outcome:<9}{figures[test]['seconds']:>8.2f} s")
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
    made = seconds.get(("setup", "test_the_oracle_agrees_with_the_reader[sealed]"), 0.0)
    print(json.dumps({
        "rows": arguments.rows, "made_s": made, "total_s": round(time.monotonic() - begun, 1), "tests": figures,
    }))  # fmt: skip
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
