"""The process that gets killed. `python fault_child.py` forks a new writer per order that it reads from stdin.

Forking from a process that has imported everything makes a cycle cheap. This process runs no thread and no
Arrow computation of its own, so that its children start clean.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from fault_rows import write_step

from loopscope.store import RunStore, StoreOptions
from loopscope.store.seal.sealer import seal_all


def write_until_killed(order: dict[str, Any], acknowledge: int) -> None:
    """Claim an attempt and write steps; each step is acknowledged once all its rows were taken."""
    options = StoreOptions(
        tick_s=0.002, seal_in="thread", rotate_bytes=order["rotate_bytes"], fsync_s=0.01, on_error="raise"
    )
    root = Path(order["root"])
    store = RunStore.create(root, options=options) if order["new"] else RunStore.open(root, options=options)
    attempt = store.claim_attempt(first_step=order["first_step"], parent_attempt=order["parent"])
    os.write(acknowledge, b"a%d\n" % attempt.attempt)
    writer = store.writer(attempt=attempt)
    for step in range(order["first_step"], order["first_step"] + order["steps"]):
        write_step(writer, step)
        os.write(acknowledge, b"%d\n" % step)
    store.close()
    os.write(acknowledge, b"done\n")


def seal_until_killed(order: dict[str, Any], acknowledge: int) -> None:
    """Seal whatever is left."""
    os.write(acknowledge, b"a0\n")
    root = Path(order["root"])
    seal_all(root, [p.name for p in sorted((root / "journal").glob("*.wal"))])
    os.write(acknowledge, b"done\n")


def main() -> None:
    """Read orders, fork, answer with the child's pid; its acknowledgements go to the named pipe of the order."""
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                acknowledge = os.open(order["pipe"], os.O_WRONLY)
                (write_until_killed if order["kind"] == "write" else seal_until_killed)(order, acknowledge)
                status = 0
            except BaseException as error:
                os.write(2, f"child: {error!r}\n".encode())
            finally:
                os._exit(status)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
