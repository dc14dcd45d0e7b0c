"""Small runs under a folder, and a client of the service over them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.testclient import TestClient

from loopscope.service import make_app
from loopscope.store import JournalWriter, RunStore


def client(root: Path, *, token: str | None = None, host: str = "http://127.0.0.1:8321") -> TestClient:
    return TestClient(make_app(root, token=token), base_url=host, follow_redirects=False)


@contextmanager
def server(root: Path) -> Iterator[str]:
    """The service over `root` behind the real server, on a free port of this machine; gives the address."""
    listening = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(make_app(root), log_level="error"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(20)


def keys_of(address: str) -> dict[str, str]:
    """Name → key of every run."""
    return {run["name"]: run["key"] for run in httpx.get(f"{address}/api/runs", timeout=60).json()["runs"]}


def loss_row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "aggregation_scope": "global", "task_loss": 5.0 - 0.01 * step, "total_loss": 5.0 - 0.01 * step,
        "closure_error": 0.0, "tokens_seen": step * 100, "elapsed_s": step * 0.5,
    } | more  # fmt: skip


def open_writer(path: Path, *, name: str = "") -> tuple[RunStore, JournalWriter]:
    store = RunStore.create(path, run_name=name)
    return store, store.writer(attempt=store.claim_attempt(first_step=1))


def finished_run(path: Path, *, name: str = "", steps: int = 5) -> Path:
    store, writer = open_writer(path, name=name)
    for step in range(1, steps + 1):
        writer.append("loss", loss_row(step))
    store.close()
    return path
