"""One writer, in a process of its own: `store_child.py NAME FOLDER STEPS SEED KILL`. Prints its times as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from store_writers import POSITIONS, SCALARS, TRACE_EVERY, VISIT_SCALARS, WRITERS


def main() -> None:
    """Write, and print the time of every step."""
    name, folder, steps, seed, kill = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
    generator = np.random.default_rng(seed)
    # Values that look like training: smooth, noisy, of full precision.
    scalars = (np.linspace(4, 2, steps)[:, None] + generator.normal(0, 0.02, (steps, SCALARS))).tolist()
    traced = generator.normal(1, 0.1, (steps // TRACE_EVERY + 1, POSITIONS, VISIT_SCALARS)).tolist()
    writer = WRITERS[name][0](folder)
    times, own = np.empty(steps), np.empty(steps)
    for index in range(steps):
        visits = traced[index // TRACE_EVERY] if (index + 1) % TRACE_EVERY == 0 else []
        prepared = writer.prepare(index + 1, scalars[index], visits)
        used, begun = time.thread_time(), time.perf_counter()
        writer.write(index + 1, prepared)
        times[index], own[index] = time.perf_counter() - begun, time.thread_time() - used
    if kill:
        sys.stdout.write(json.dumps({"steps": steps}))
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.perf_counter()
    writer.close()
    closing = time.perf_counter() - begun
    answer = {"times_us": times * 1e6, "own_us": own * 1e6}
    print(json.dumps({**{k: v.round(2).tolist() for k, v in answer.items()}, "close_ms": closing * 1e3}))


if __name__ == "__main__":
    main()
