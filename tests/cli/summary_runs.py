"""Runs made of hand-written rows, for the summary's tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from loopscope.store import RunStore

Rows = Iterable[tuple[str, dict[str, object]]]


def make_run(path: Path, rows: Rows, *, ranks: int = 1, claim: bool = True) -> Path:
    """A closed run of one attempt that holds `rows`, (table, columns) pairs."""
    store = RunStore.create(path, run_name="made")
    if claim:
        attempt = store.claim_attempt(first_step=1, world_size=ranks)
        writer = store.writer(attempt=attempt, on_error="raise")
        for table, row in rows:
            keys = {"rank": 0, "world_size": ranks, "aggregation_scope": "rank_local"}
            writer.append(table, keys | row)
    store.close()
    return path


def loss(step: int, task: float | None, **more: object) -> tuple[str, dict[str, object]]:
    row: dict[str, object] = {"step": step, "task_loss": task, "total_loss": task, "closure_error": 0.0}
    return "loss", row | more


def router(step: int, pos: int, maxvio: float | None, **more: object) -> tuple[str, dict[str, object]]:
    inside = 0 < pos < 3
    row: dict[str, object] = {
        "step": step,
        "block": "loop" if inside else "head",
        "unrolled_pos": pos,
        "loop_step": pos - 1 if inside else None,
        "layer_idx": 0 if inside else None,
        "num_experts": 16,
        "top_k": 2,
        "load_entropy_ratio": 0.875,
        "maxvio_count": maxvio,
        "dead_experts": 1,
        "z_mean": 2.5,
    }
    return "router", row | more


def boundary(step: int, to: int, delta: float, **more: object) -> tuple[str, dict[str, object]]:
    row: dict[str, object] = {
        "step": step,
        "kind": "step_boundary",
        "from_pos": to,
        "to_pos": to + 1,
        "from_loop_step": to - 1,
        "to_loop_step": to,
        "from_layer_idx": 0,
        "to_layer_idx": 0,
        "relative_delta": delta,
        "growth": 1.25,
        "state_cosine": 0.9,
        "topk_overlap": 0.5,
        "overlap_chance": 0.125,
    }
    return "transition", row | more


def probe(
    step: int, kind: str, stratum: str, value: float | None, corpus: str = "a" * 64, **more: object
) -> tuple[str, dict[str, object]]:
    row: dict[str, object] = {
        "step": step,
        "corpus_name": "core",
        "corpus_hash": corpus,
        "stratum_kind": kind,
        "stratum": stratum,
        "loss_mean": value,
        "num_documents": 3,
    }
    return "probe_loss", row | more


def health(step: int, event: str, severity: str = "info", **more: object) -> tuple[str, dict[str, object]]:
    return "health", {"step": step, "event": event, "severity": severity} | more


def reasons(**columns: str) -> str:
    return json.dumps(columns)
