"""Random histories of attempts, some of which die before their first row: exactly one live row per position."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from fault_rows import POSITIONS, loss_row, router_row

from loopscope.analysis import open_run
from loopscope.store import RunStore, StoreOptions

_OPTIONS = StoreOptions(tick_s=3600.0, on_error="raise")


def run_rollbacks(folder: Path, *, histories: int, seed: int) -> dict[str, Any]:
    """`histories` random trainings with two writers each: one writes losses, both write their positions."""
    generator = random.Random(seed)
    figures = {
        "histories": 0,
        "attempts": 0,
        "died_empty": 0,
        "wrong_live": 0,
        "doubled": 0,
        "stale": 0,
        "sql": 0,
    }
    for _ in range(histories):
        root = folder / "history"
        _one(root, generator, figures)
        shutil.rmtree(root)
        figures["histories"] += 1
    return figures


def _one(root: Path, generator: random.Random, figures: dict[str, int]) -> None:
    # What a checkpoint at a step holds: the attempt that wrote every step up to it.
    lineage: dict[int, int] = {}
    checkpoints: dict[int, dict[int, int]] = {0: {}}
    RunStore.create(root, options=_OPTIONS).close()
    for _ in range(generator.randint(2, 6)):
        restored = generator.choice(sorted(checkpoints))
        history = dict(checkpoints[restored])
        parent = history.get(restored)
        store = RunStore.open(root, options=_OPTIONS)
        attempt = store.claim_attempt(first_step=restored + 1, parent_attempt=parent)
        figures["attempts"] += 1
        writers = [store.writer(attempt=attempt, writer=name) for name in ("r0", "r1")]
        steps = generator.choice([0, 1, 5, 12])
        figures["died_empty"] += steps == 0
        # Checkpoints later than the one that was loaded are overwritten or unreachable from here on.
        if steps:
            checkpoints = {s: h for s, h in checkpoints.items() if s <= restored}
        for step in range(restored + 1, restored + 1 + steps):
            history[step] = attempt.attempt
            writers[0].append("loss", loss_row(step, attempt.attempt))
            for position in range(POSITIONS):
                writers[position % 2].append("router", router_row(step, position, attempt.attempt))
            if generator.random() < 0.3:
                checkpoints[step] = dict(history)
        if steps:
            lineage = history
        store.close(seal=generator.random() < 0.5)
    run = open_run(root)
    live = run.arrow("router", columns=["attempt", "step", "unrolled_pos", "token_entropy_mean"]).to_pylist()
    seen = Counter((r["step"], r["unrolled_pos"]) for r in live)
    figures["doubled"] += sum(n - 1 for n in seen.values())
    figures["wrong_live"] += seen.keys() != {(s, p) for s in lineage for p in range(POSITIONS)}
    figures["stale"] += sum(r["attempt"] != lineage.get(r["step"]) for r in live)
    losses = {r["step"]: r["attempt"] for r in run.arrow("loss").to_pylist()}
    figures["wrong_live"] += losses != lineage
    figures["sql"] += run.sql("select count(*) from router").fetchall() != [(len(live),)]
