"""What the alert rules cost: on the training thread per step, and once per resume (or report) for the run's past.

CPU seconds, so that a busy machine changes little. 34 visits: a head, 8 loop steps of 4 layers, a tail.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "report"))

from report_runs import Shape, generated_run  # noqa: E402

from loopscope.alerts import AlertingWriter, AlertSettings, replay  # noqa: E402
from loopscope.collect.writer import NullWriter  # noqa: E402
from loopscope.store import RunReader  # noqa: E402

LOOPS, LAYERS, EXPERTS, TOP_K = 8, 4, 64, 8
VISITS = LOOPS * LAYERS + 2
MANY = 256
"""Loop visits of a deep model."""
STATES = {"healthy": 0, "one visit sick": 1, "every visit sick": 1000}


class Rows(NullWriter):
    """Takes rows in one call, as the store does."""

    def append_many(self, table: str, rows: Any) -> None:
        pass


def trace(step: int, sick: int, loops: int = LOOPS) -> dict[str, list[dict[str, Any]]]:
    """The rows of one traced step."""
    keys = {"step": step, "run_id": "r", "attempt": 1, "aggregation_scope": "global"}
    loop = [("loop", r, layer) for r in range(loops) for layer in range(LAYERS)]
    router, residual, transition = [], [], []
    for position, (block, r, layer) in enumerate([("head", None, None), *loop, ("tail", None, None)]):
        bad = position < sick
        visit = keys | {"block": block, "unrolled_pos": position, "loop_step": r, "layer_idx": layer}
        router.append(
            visit
            | {
                "num_experts": EXPERTS, "top_k": TOP_K, "num_tokens": 8192, "maxvio_count": 6.0 if bad else 0.2,
                "load_entropy_ratio": 0.4 if bad else 0.99, "token_entropy_ratio": 0.6, "mutual_information": 0.5,
                "z_mean": 2.0, "logit_abs_max": 6.0, "dead_experts": 8 if bad else 0,
                "expert_count": [0] * 8 * bad + [1024] * (EXPERTS - 8 * bad),
            }
        )  # fmt: skip
        residual.append(visit | {"token_correlation": 0.3})
        if r:
            pair = {"kind": "step_boundary", "to_layer_idx": layer, "to_loop_step": r}
            transition.append(keys | pair | {"growth": 1 + 0.4 / r, "relative_delta": 0.5 / r})
    return {"router": router, "residual": residual, "transition": transition}


def live(sick: int, steps: int = 300, loops: int = LOOPS) -> float:
    """Microseconds per traced step."""
    writer = AlertingWriter(Rows(), AlertSettings(warmup_steps=0))
    traces = [trace(step, sick, loops) for step in range(1, steps + 1)]

    def run() -> None:
        for step, tables in enumerate(traces, 1):
            for table, rows in tables.items():
                writer.append_many(table, rows)
            writer.append_many("health", [{"step": step, "event": "coverage", "severity": "info"}])

    return _cpu(run) / steps * 1e6


def per_loss_row(steps: int = 20_000) -> float:
    """Microseconds per loss row."""
    writer = AlertingWriter(Rows(), AlertSettings())
    row = {"total_loss": 3.0, "closure_error": 1e-7, "nonfinite_fields": None, "aggregation_scope": "global"}
    rows = [row | {"step": step} for step in range(steps)]
    return _cpu(lambda: [writer.append_many("loss", (row,)) for row in rows]) / steps * 1e6


def replayed(every: int, sick: int, steps: int, experts: int) -> dict[str, float]:
    """Seconds of a replay over a stored run, and the largest memory of this process so far."""
    rows = steps // every * VISITS
    position = np.arange(rows) % VISITS
    bad = position < sick
    changes = {
        "maxvio_count": np.where(bad, 6.0, 0.2), "load_entropy_ratio": np.where(bad, 0.4, 0.99),
        "dead_experts": np.where(bad, 1, 0),
    }  # fmt: skip
    shape = Shape(
        steps=steps, every=every, loops=LOOPS, layers=LAYERS, experts=experts, top_k=min(TOP_K, experts // 2),
        tokens=8192, changes={"router": changes} if sick else {},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        # In a process of its own: making the rows takes more memory than judging them.
        child = multiprocessing.get_context("spawn").Process(target=generated_run, args=(run, shape))
        child.start()
        child.join()
        found: list[Any] = []
        seconds = _cpu(lambda: found.append(replay.replay_run(RunReader(run), AlertSettings())))
        alerts = len(found[0].alerts)
    return {
        "traced_every": every,
        "cpu_s": round(seconds, 2),
        "peak_mb": _peak(),
        "alerts": alerts,
    }


def _cpu(run: Callable[[], object]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, nargs="*", default=[10])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--states", nargs="*", default=list(STATES), choices=list(STATES))
    given = parser.parse_args()
    import logging

    logging.getLogger("loopscope.alerts").setLevel(logging.ERROR)
    found: dict[str, Any] = {"us_per_loss_row": round(per_loss_row(), 1)}
    for name, sick in STATES.items():
        found[f"us_per_traced_step, {name}"] = round(live(sick))
        found[f"us_per_traced_step of {MANY} visits, {name}"] = round(live(sick, 100, MANY // LAYERS))
    for every in given.every:
        for name, sick in [(name, STATES[name]) for name in given.states]:
            found[f"replay, {name}, every {every}"] = replayed(every, sick, given.steps, given.experts)
    for key, value in found.items():
        print(f"{key:<40} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
