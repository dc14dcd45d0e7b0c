"""Fifty clients on one live run, over the real server, while another process writes it."""

import concurrent.futures
import subprocess
import sys
import threading
import time

import httpx
import psutil
from service_runs import keys_of, server

from loopscope import open_run

CLIENTS, SECONDS = 50, 6.0
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


def test_fifty_clients_on_a_live_run(tmp_path):
    here = str(tmp_path.__class__(__file__).parent)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "live"), here], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    lines: list[str] = []
    try:
        assert writer.stdout is not None
        assert writer.stdin is not None
        lines.append(writer.stdout.readline())
        reading = threading.Thread(target=lambda: lines.extend(writer.stdout), daemon=True)
        reading.start()
        with server(tmp_path) as address:
            (key,) = keys_of(address).values()
            # Imports and the first reading are no part of the load.
            assert httpx.get(f"{address}/runs/{key}", timeout=120).status_code == 200
            before, begun = psutil.Process().memory_info().rss, time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
                found = list(pool.map(lambda i: client(address, key, i, begun + SECONDS), range(CLIENTS)))
            grown = psutil.Process().memory_info().rss - before
    finally:
        writer.stdin.close()
        writer.wait(60)
        reading.join(60)
        writer.stdout.close()
    asked = [answer for each in found for answer in each]
    assert {status for _, status, _, _ in asked} == {200}
    # Every client was served again and again, with steps that only grow.
    for each in found:
        assert len(each) >= 3
        steps = [step for _, _, step, _ in each if step is not None]
        assert steps == sorted(steps)
    # The run went on, and none of its rows is missing.
    last = int(lines[-1])
    assert max(step for _, _, step, _ in asked if step is not None) > int(lines[0])
    run = open_run(tmp_path / "live")
    assert run.sql("select count(*), max(step) from loss").fetchall() == [(last, last)]
    assert run.sql("select count(*) from router").fetchall() == [(last // 2 * 6,)]
    assert run.problems == []
    assert grown < 400e6
    waited = sorted(seconds for *_, seconds in asked)
    print(
        f"{len(asked)} answers in {SECONDS} s, median {waited[len(waited) // 2]:.3f} s, 95% "
        f"{waited[int(len(waited) * 0.95)]:.3f} s, slowest {waited[-1]:.3f} s; {last} steps; {grown / 1e6:.0f} MB"
    )


def client(address, key, number, until):
    """What a browser asks: the page, then its version and the last values again and again."""
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
