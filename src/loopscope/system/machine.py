"""The machine itself, as psutil sees it: two readings make the rates of one row."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COUNTERS = ("disk_read", "disk_written", "net_received", "net_sent")
"""Bytes since the machine started; a row has what they grew by, per second."""
RATES = (*COUNTERS, "cpu_percent", "interval_s")


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read at one moment; what the system does not tell is absent."""

    at: float
    """Monotonic seconds."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Column → value."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Of `COUNTERS`."""
    busy: tuple[float, float] | None = None
    """(busy, all) processor seconds of all cores since the machine started."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Column → why it is not there."""


def read_machine(psutil: Any, folder: str) -> Reading:
    """Read everything; what fails is left out with its reason."""
    values: dict[str, float] = {}
    counters: dict[str, int] = {}
    absent: dict[str, str] = {}
    busy: list[tuple[float, float]] = []

    def try_to(read: Callable[[], Mapping[str, Any]], into: dict[str, Any], *names: str) -> None:
        try:
            into.update(read())
        except Exception as error:  # noqa: BLE001 - a kernel without a file, a container without a right
            absent.update(dict.fromkeys(names, f"absent: {type(error).__name__}: {error}"))

    def processors() -> Mapping[str, Any]:
        times = psutil.cpu_times()
        everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy.append((everything - times.idle - getattr(times, "iowait", 0.0), everything))
        return {}

    def memory() -> Mapping[str, Any]:
        found = psutil.virtual_memory()
        return {"memory_used": found.total - found.available, "memory_total": found.total}

    def disk() -> Mapping[str, Any]:
        found = psutil.disk_io_counters()
        return {"disk_read": found.read_bytes, "disk_written": found.write_bytes}

    def net() -> Mapping[str, Any]:
        cards = [
            card for name, card in psutil.net_io_counters(pernic=True).items() if name not in ("lo", "lo0")
        ]
        return {
            "net_received": sum(c.bytes_recv for c in cards),
            "net_sent": sum(c.bytes_sent for c in cards),
        }

    try_to(processors, values, "cpu_percent")
    try_to(lambda: {"load_1min": psutil.getloadavg()[0]}, values, "load_1min")
    try_to(memory, values, "memory_used", "memory_total")
    try_to(lambda: {"process_memory": psutil.Process().memory_info().rss}, values, "process_memory")
    try_to(lambda: {"disk_free": psutil.disk_usage(folder).free}, values, "disk_free")
    try_to(disk, counters, "disk_read", "disk_written")
    try_to(net, counters, "net_received", "net_sent")
    return Reading(time.monotonic(), values, counters, busy[0] if busy else None, absent)


def machine_row(before: Reading | None, now: Reading) -> tuple[dict[str, Any], dict[str, str]]:
    """Columns of a host's row, and why others are null.

    Args:
        before: the reading before this one; None for the first.
        now: what was just read.
    """
    row: dict[str, Any] = dict(now.values)
    nulls = dict(now.absent)
    if before is None:
        return row, {**nulls, **{name: "absent: first sample" for name in RATES if name not in nulls}}
    seconds = now.at - before.at
    if seconds <= 0:
        return row, {**nulls, **{name: "absent: no time had passed" for name in RATES if name not in nulls}}
    row["interval_s"] = seconds
    for name in COUNTERS:
        if name not in now.counters or name not in before.counters:
            nulls.setdefault(name, "absent: not told by the system")
        elif now.counters[name] < before.counters[name]:
            nulls[name] = "absent: the counter went back"
        else:
            row[name] = (now.counters[name] - before.counters[name]) / seconds
    if now.busy is None or before.busy is None:
        nulls.setdefault("cpu_percent", "absent: not told by the system")
    elif (whole := now.busy[1] - before.busy[1]) <= 0 or now.busy[0] < before.busy[0]:
        nulls["cpu_percent"] = "absent: the counter went back"
    else:
        row["cpu_percent"] = 100.0 * (now.busy[0] - before.busy[0]) / whole
    return row, nulls
