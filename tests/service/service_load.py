"""Many clients on one live run, over the real server, while another process writes it; figures of what they saw."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from service_runs import keys_of, server

# Six visits every second step, as fast as a quick training; it ends when its standard input does.
WRITER = """
import sys, threading, time
sys.path.insert(0, sys.argv[2])
from service_runs import loss_row, open_writer
from pathlib import Path
store, writer = open_writer(Path(sys.argv[1]), name="live")
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
step = 0
while not over.is_set():
    step += 1
    writer.append("loss", loss_row(step))
    for position in range(6 if step % 2 == 0 else 0):
        writer.append("router", {
            "step": step, "aggregation_scope": "global", "block": "loop", "unrolled_pos": position, "layer_idx": 0,
            "loop_step": position, "num_experts": 8, "top_k": 2, "num_tokens": 512, "expert_count": [128] * 8,
            "load_entropy_ratio": 1.0, "maxvio_count": 0.0, "dead_experts": 0, "nonfinite_count": 0,
        })
    writer.flush()
    print(step, flush=True)
    time.sleep(0.02)
store.close()
"""


def load(root: Path, *, clients: int, seconds: float) -> dict[str, Any]:
    """Writes `root`/live while `clients` ask for `seconds`: their answers, first and last step, growth in bytes."""
    here = str(Path(__file__).parent)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root / "live"), here], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    lines: list[str] = []
    try:
        assert writer.stdout is not None
        assert writer.stdin is not None
        lines.append(writer.stdout.readline())
        reading = threading.Thread(target=lambda: lines.extend(writer.stdout), daemon=True)
        reading.start()
        with server(root) as address:
            (key,) = keys_of(address).values()
            # Imports and the first reading are no part of the load.
            assert httpx.get(f"{address}/runs/{key}", timeout=120).status_code == 200
            before, until = psutil.Process().memory_info().rss, time.monotonic() + seconds
            with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                found = list(pool.map(lambda i: _client(address, key, i, until), range(clients)))
            grown = psutil.Process().memory_info().rss - before
    finally:
        writer.stdin.close()
        writer.wait(60)
        reading.join(60)
        writer.stdout.close()
    return {"clients": found, "first_step": int(lines[0]), "last_step": int(lines[-1]), "grown": grown}


def _client(address: str, key: str, number: int, until: float) -> list[tuple[str, int, int | None, float]]:
    """What a browser asks: the page, then its version and the last values again and again.

    An answer is (path, status, step that the last values are of, seconds).
    """
    found = []
    with httpx.Client(base_url=address, timeout=120) as http:
        paths = [
            f"/runs/{key}",
            f"/api/runs/{key}/version",
            f"/api/runs/{key}",
            f"/api/runs/{key}/tables/loss?from=1",
        ]
        paths += ["/metrics", "/api/runs"] if number % 10 == 0 else []
        turn = 0
        while time.monotonic() < until or turn < 3:
            path = paths[turn % len(paths)]
            begun = time.monotonic()
            answer = http.get(path)
            told = path == f"/api/runs/{key}" and answer.status_code == 200
            step = answer.json()["headline"]["step"] if told else None
            found.append((path, answer.status_code, step, time.monotonic() - begun))
            turn += 1
            time.sleep(0.05)
    return found
