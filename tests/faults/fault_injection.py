"""ENOSPC and EIO at every call: nothing leaves the store, and readable + dropped = attempted."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

from fault_disk import FaultyDisk
from fault_rows import write_step, wrong_rows

from loopscope.store import RunReader, RunStore, StoreOptions
from loopscope.store.read.verify import verify_run

# No background thread gets a turn: the scenario ticks by itself, so that the nth call is always the same one.
_OPTIONS = StoreOptions(tick_s=3600.0, seal_in="thread", rotate_bytes=4000, fsync_s=1e-9)
STEPS = 16


def scenario(root: Path, disk: FaultyDisk) -> dict[str, Any]:
    """One short training on a disk that may fail at any call of the loop."""
    disk.armed = False
    store = RunStore.create(root, disk=disk, options=_OPTIONS)
    attempt = store.claim_attempt(first_step=1)
    writer = store.writer(attempt=attempt)
    disk.armed = True
    escaped: list[str] = []
    for step in range(1, STEPS + 1):
        try:
            write_step(writer, step)
            if step % 4 == 0:
                writer.tick()
                store._background._seal()
            if step % 8 == 0:
                writer.flush(durable=True)
        except Exception as error:
            escaped.append(f"step {step}: {error!r}")
    attempted = writer.attempted
    try:
        store.close()
    except Exception as error:
        escaped.append(f"close: {error!r}")
    disk.armed = False
    reader = RunReader(root)
    readable = {t: reader.read(t, live=False) for t in ("loss", "router")}
    reported = reader.read("health", live=False)
    counts = [r["count"] for r in reported.to_pylist() if r["event"] == "dropped_rows"]
    return {
        "escaped": escaped,
        "attempted": attempted,
        "readable": sum(t.num_rows for t in readable.values()),
        "dropped": writer.dropped,
        "reported": sum(counts),
        "wrong": sum(len(wrong_rows(t, rows)) for t, rows in readable.items()),
        "problems": [str(p) for p in verify_run(root).problems],
        "calls": disk.calls,
    }


def run_injection(folder: Path, *, stride: int = 1) -> dict[str, Any]:
    """Fail every `stride`th call once, for a while, and for ever, with each error. Returns the figures."""
    total = scenario(folder / "clean", FaultyDisk(0, 0))["calls"]
    figures: dict[str, Any] = {
        "scenarios": 0, "exceptions": 0, "unaccounted": 0, "wrong": 0, "dropped": 0, "unreported": 0,
        "problems": 0, "examples": [],
    }  # fmt: skip
    for code in (errno.ENOSPC, errno.EIO):
        for width in (1, 7, 10**9):
            for first in range(1, total + 1, stride):
                root = folder / "run"
                result = scenario(root, FaultyDisk(first, first + width, code))
                shutil.rmtree(root)
                figures["scenarios"] += 1
                figures["exceptions"] += len(result["escaped"])
                figures["wrong"] += result["wrong"]
                figures["dropped"] += result["dropped"]
                unaccounted = result["attempted"] - result["readable"] - result["dropped"]
                figures["unaccounted"] += unaccounted != 0
                figures["problems"] += len(result["problems"])
                # Where the disk works again before the end, the count itself must have been written.
                if width < 10**9 and first + width < total - 40:
                    figures["unreported"] += result["reported"] != result["dropped"]
                if (unaccounted or result["escaped"] or result["wrong"] or result["problems"]) and len(
                    figures["examples"]
                ) < 5:
                    figures["examples"].append({"code": code, "width": width, "first": first, **result})
    figures["calls"] = total
    return figures
