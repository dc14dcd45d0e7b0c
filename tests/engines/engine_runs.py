"""Two runs by the real writer, each over two schema versions, with a rollback and a leftover temporary file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopscope.store import TABLES, Column, RunStore, StoreOptions, TableSchema
from loopscope.store.read.compact import compact_run
from loopscope.store.seal.seal_run import seal_run

EXPERTS = 16
LOOP_STEPS = 4
_OPTIONS = StoreOptions(tick_s=3600.0, seal_in="thread", on_error="raise")

ROUTER = TABLES["router"]
_LATER = Column(name="later", formula="came with the next version", since=ROUTER.version + 1)
ROUTER_V2 = replace(ROUTER, columns=(*ROUTER.columns, _LATER), version=ROUTER.version + 1)
TABLES_V2: Mapping[str, TableSchema] = {**TABLES, "router": ROUTER_V2}


def router_row(run: int, step: int, rank: int, loop_step: int, attempt: int) -> dict[str, Any]:
    angle = 0.37 * step + 1.7 * rank + 0.9 * loop_step + 3.1 * run
    row: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "world_size": 64,
        "aggregation_scope": "rank_local",
        "block": "loop",
        "unrolled_pos": 1 + loop_step,
        "loop_step": loop_step,
        "layer_idx": 0,
        "num_experts": EXPERTS,
        "top_k": 2,
        "num_tokens": 512,
        "expert_count": [(step * 7 + rank * 3 + e * e + loop_step) % 97 for e in range(EXPERTS)],
        "mean_prob": [1.0 / (1 + e) for e in range(EXPERTS)],
        # Superseded rows hold values that would shift every mean.
        "token_entropy_mean": 2.0 + math.sin(angle) + (0.0 if attempt > 1 else 1e-3 * step),
        "maxvio_count": 1.0 + math.cos(angle * 1.3),
    }
    if attempt > 1:
        row["later"] = angle
    return row


def make_runs(folder: Path, *, rows: int, ranks: int = 64) -> list[Path]:
    """About `rows` rows over two runs; a third of the first attempt is superseded by the second."""
    steps = max(6, rows // (2 * ranks * LOOP_STEPS))
    first = range(1, int(steps * 0.6) + 1)
    second = range(int(steps * 0.4) + 1, steps + 1)
    roots = []
    for run in (0, 1):
        root = folder / f"run {'ab'[run]} é"
        for attempt, (span, tables, parent) in enumerate(
            ((first, TABLES, None), (second, TABLES_V2, 1)), start=1
        ):
            make = RunStore.create if attempt == 1 else RunStore.open
            store = make(root, options=_OPTIONS, tables=tables)
            claimed = store.claim_attempt(first_step=span.start, parent_attempt=parent, world_size=ranks)
            for rank in range(ranks):
                writer = store.writer(attempt=claimed, writer=f"r{rank:05d}")
                for step in span:
                    for loop_step in range(LOOP_STEPS):
                        writer.append("router", router_row(run, step, rank, loop_step, attempt))
                    if rank == 0:
                        writer.append(
                            "loss", {"step": step, "aggregation_scope": "global", "task_loss": 1.0 / step}
                        )
                writer.close()
            store.close()
        (root / "journal" / "00002-r00000-00009.router.tmp").write_bytes(b"PAR1 half a file")
        seal_run(root)
        roots.append(root)
    return roots


def compact_runs(roots: list[Path]) -> list[Path]:
    """Compact each run with the newer schemas; the folders of the live rows."""
    return [compact_run(root, tables=TABLES_V2).path for root in roots]
