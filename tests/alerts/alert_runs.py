"""Random rows of a small looped model, written through the store in attempts that end in every way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loopscope.alerts import Alert, AlertEngine, AlertingWriter, AlertSettings, replay
from loopscope.store import RunReader, RunStore, StoreOptions
from loopscope.store.disk import Disk


class _NoSync(Disk):
    """A disk that never waits: the tests pull no plug."""

    def fsync(self, fd: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


SETTINGS = AlertSettings(warmup_steps=4, sustain=3, dead_expected=20.0, again_after=6)
OPTIONS = StoreOptions(seal_in="thread", tick_s=3600)
EXPERTS, TOKENS = 4, 40


def rows_of(
    step: int, generator: np.random.Generator, sick: float, loops: int = 4
) -> Iterator[tuple[str, dict]]:
    """(table, row) of one traced step, coverage last; `sick` is the share of values that break a bound."""

    def pick(good: float, bad: float) -> float | None:
        if generator.random() < 0.05:
            return None
        return bad if generator.random() < sick else good + 0.15 * generator.random()

    shared = {"step": step, "rank": 0, "world_size": 1, "aggregation_scope": "rank_local"}
    wrong = generator.random() < sick
    yield "loss", shared | {
        "task_loss": 2.0, "total_loss": 2.0, "closure_error": pick(0.0, 0.0) and (0.3 if wrong else 1e-5),
        "nonfinite_fields": "lb_loss" if generator.random() < 0.02 else None,
    }  # fmt: skip
    loop = [("loop", r, 0) for r in range(loops)]
    visits = [("head", None, None), *loop, ("tail", None, None), ("tail", None, None)]
    for position, (block, r, layer) in enumerate(visits):
        counts = [0 if generator.random() < sick else 10 for _ in range(EXPERTS)]
        yield "router", shared | {
            "block": block, "unrolled_pos": position, "loop_step": r, "layer_idx": layer, "num_experts": EXPERTS,
            "top_k": 1, "num_tokens": TOKENS, "maxvio_count": pick(0.1, 2.9), "load_entropy_ratio": pick(0.84, 0.4),
            "token_entropy_ratio": pick(0.5, 0.01), "mutual_information": pick(0.3, 0.001), "z_mean": pick(2, 14),
            "logit_abs_max": pick(6, 49.9) if step % 3 else None, "dead_experts": counts.count(0),
            "expert_count": counts,
        }  # fmt: skip
        yield "residual", shared | {
            "block": block, "unrolled_pos": position, "loop_step": r, "layer_idx": layer,
            "token_correlation": pick(0.5, 0.95),
        }  # fmt: skip
    for r in range(1, loops):
        yield "transition", shared | {
            "kind": "step_boundary", "from_pos": r, "to_pos": r + 1, "from_loop_step": r - 1, "to_loop_step": r,
            "from_layer_idx": 0, "to_layer_idx": 0, "growth": pick(1.0, 1.3), "relative_delta": pick(0.2, 0.6),
        }  # fmt: skip
    if generator.random() < 0.1:
        yield (
            "health",
            shared | {"event": "nonfinite", "severity": "critical", "unrolled_pos": 1, "detail": "x"},
        )
    yield "health", shared | {"event": "coverage", "severity": "info"}


def observe(engine: AlertEngine, table: str, step: int, rows: list[dict]) -> list[Alert]:
    """The engine's answer to rows of one step."""
    return engine.observe_rows(table, [{"step": step, **row} for row in rows])


class Attempt:
    """One attempt with the rules beside it."""

    def __init__(self, root: Path, first_step: int = 1, parent: int | None = None, **options: Any) -> None:
        self.store = RunStore.create(
            root, resume=(root / "run.json").exists(), options=OPTIONS, disk=_NoSync()
        )
        self.number = self.store.claim_attempt(first_step=first_step, parent_attempt=parent).attempt
        state = None if self.number == 1 else replay.state_before(RunReader(root), SETTINGS, self.number)
        inner = self.store.writer(attempt=self.number, writer="r00000")
        self.writer = AlertingWriter(inner, SETTINGS, state=state, **options)

    def write(self, step: int, generator: np.random.Generator, sick: float, **options: Any) -> None:
        for table, row in rows_of(step, generator, sick, **options):
            self.writer.append(table, row)

    def close(self) -> None:
        self.writer.close()
        self.store.close()

    def kill(self) -> None:
        """As if the process died: nothing is judged or sealed any more; the locks are given back for the next."""
        self.store.close(seal=False)
