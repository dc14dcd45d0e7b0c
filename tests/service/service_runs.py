"""Small runs under a folder, and a client of the service over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from loopscope.service import Access, make_app
from loopscope.store import RowWriter, RunStore


def client(root: Path, *, token: str | None = None, host: str = "http://127.0.0.1:8321") -> TestClient:
    return TestClient(make_app(root, access=Access(token=token)), base_url=host, follow_redirects=False)


def loss_row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "aggregation_scope": "global", "task_loss": 5.0 - 0.01 * step, "total_loss": 5.0 - 0.01 * step,
        "closure_error": 0.0, "tokens_seen": step * 100, "elapsed_s": step * 0.5,
    } | more  # fmt: skip


def open_writer(path: Path, *, name: str = "") -> tuple[RunStore, RowWriter]:
    store = RunStore.create(path, run_name=name)
    return store, store.writer(attempt=store.claim_attempt(first_step=1))


def finished_run(path: Path, *, name: str = "", steps: int = 5) -> Path:
    store, writer = open_writer(path, name=name)
    for step in range(1, steps + 1):
        writer.append("loss", loss_row(step))
    store.close()
    return path
