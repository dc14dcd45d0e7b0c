"""Small runs for tests of the store and of readers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loopscope.store import TABLES, Attempt, RunStore, StoreOptions, TableSchema
from loopscope.store.checksum import with_checksum

QUIET = StoreOptions(tick_s=3600.0, on_error="raise")
"""No background work, and every error raised."""


def loss(step: int, value: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "aggregation_scope": "global", "task_loss": value, **more}


def visit(step: int, position: int = 0, rank: int | None = None, **more: Any) -> dict[str, Any]:
    scope = "global" if rank is None else "rank_local"
    return {"step": step, "unrolled_pos": position, "rank": rank, "aggregation_scope": scope, **more}


def change_manifest(root: Path, **changes: Any) -> None:
    """run.json with other members, as another version might have written it."""
    members = json.loads((root / "run.json").read_text())
    del members["checksum"]
    (root / "run.json").write_bytes(with_checksum(json.dumps({**members, **changes}).encode()))


def write_attempt(
    root: Path,
    steps: range,
    *,
    first_step: int | None = None,
    parent: int | None = None,
    value: float = 1.0,
    seal: bool = True,
    tables: Mapping[str, TableSchema] = TABLES,
    **more: Any,
) -> Attempt:
    """One attempt that writes one loss row per step."""
    make = RunStore.open if (root / "run.json").exists() else RunStore.create
    store = make(root, options=QUIET, tables=tables)
    start = first_step if first_step is not None else steps.start
    attempt = store.claim_attempt(first_step=start, parent_attempt=parent)
    writer = store.writer(attempt=attempt)
    for step in steps:
        writer.append("loss", loss(step, value, **more))
    store.close(seal=seal)
    return attempt


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
