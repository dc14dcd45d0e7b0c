"""What `loopscope serve` answers under load: fifty clients on one live run for some seconds."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "service"))

from service_load import load  # noqa: E402


def main() -> int:
    """Run, print, and exit with 1 where an answer was refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=6.0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="loopscope-service-") as folder:
        seen = load(Path(folder), clients=arguments.clients, seconds=arguments.seconds)
    answers = [answer for each in seen["clients"] for answer in each]
    waited = sorted(seconds for *_, seconds in answers)
    figures = {
        "clients": arguments.clients,
        "answers": len(answers),
        "refused": sum(status != 200 for _, status, _, _ in answers),
        "median_s": round(waited[len(waited) // 2], 3),
        "p95_s": round(waited[int(len(waited) * 0.95)], 3),
        "slowest_s": round(waited[-1], 3),
        "steps": seen["last_step"],
        "grown_mb": round(seen["grown"] / 1e6, 1),
    }
    for name, value in figures.items():
        print(f"{name:<12}{value}")
    print(json.dumps(figures))
    return int(figures["refused"] > 0)


if __name__ == "__main__":
    sys.exit(main())
