"""Starts ranks without waiting for torch each time: it imports once what they need, and every rank is a fork of it.

Reads an order per line: {"script", "arguments", "ranks", "environment", "log", "timeout"}; answers each with the
ranks' exit statuses as a JSON list (-9 for a rank that was killed). A rank that is left behind by one that failed is
killed after some seconds, as torchrun does. No thread runs in this process, so its forks start clean.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

LEFT_BEHIND_S = 30.0
NEEDED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "loopscope.integrations.torchtitan.configs",
    "loopscope.integrations.torchtitan.trainer",
    "loopscope.models.toy",
)


def main() -> int:
    """Serve orders until standard input ends; in a rank, run its script instead and return."""
    from loopscope.models import cpu_compat

    cpu_compat.enable()
    for name in NEEDED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page
    for line in sys.stdin:
        order = json.loads(line)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        running = {}
        for rank in range(order["ranks"]):
            pid = os.fork()
            if pid == 0:
                ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["ranks"]}
                _run(order, {**address, **{name: str(value) for name, value in ids.items()}})
                return 0
            running[pid] = rank
        print(json.dumps(_statuses(running, time.monotonic() + order["timeout"])), flush=True)
    return 0


def _run(order: dict[str, Any], about: dict[str, str]) -> None:
    """Become what `python SCRIPT ARGUMENTS` is in that environment."""
    os.environ.clear()
    os.environ.update({**order["environment"], **about})
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for target, source in enumerate((nothing, log, log)):
        os.dup2(source, target)
    sys.argv = [order["script"], *order["arguments"]]
    sys.path[0] = str(Path(order["script"]).parent)
    runpy.run_path(order["script"], run_name="__main__")


def _statuses(running: dict[int, int], until: float) -> list[int]:
    statuses: dict[int, int] = {}
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status != 0:
                until = min(until, time.monotonic() + LEFT_BEHIND_S)
        elif time.monotonic() > until:
            for left in running:
                os.kill(left, signal.SIGKILL)
            until = float("inf")
        else:
            time.sleep(0.01)
    return [statuses[rank] for rank in sorted(statuses)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
