"""Identifiers of runs, and of the process that writes one."""

import os
import platform
import secrets
import time
import uuid
from functools import lru_cache
from pathlib import Path

import msgspec


def uuid7() -> str:
    """A UUIDv7: 48 bits of milliseconds, the rest random, so that names of runs sort by age (RFC 9562)."""
    value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(0x3 << 62) | 2 << 62
    return str(uuid.UUID(int=value))


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process, named so that a later one can tell whether it still lives."""

    host: str
    pid: int
    namespace: str
    """Boot id and pid namespace: a pid says nothing across either."""
    start: str
    """Start time in the kernel's ticks: a pid that was given out again has another one. Empty where the system does not
    tell it, as on macOS."""
    token: str = ""
    """Random, made by the process itself: how it knows itself again where there is no start time."""

    def alive(self) -> bool | None:
        """True or False for a process of this machine; None where that cannot be seen from here."""
        me = this_process()
        if (self.host, self.namespace) != (me.host, me.namespace):
            return None
        if self.pid == me.pid and self.token:
            return self.token == me.token
        if not _exists(self.pid):
            return False
        started = _start_time(self.pid)
        # A pid alone proves nothing: it may have been given out again.
        return self.start == started if self.start and started else None


def this_process() -> Process:
    """The running process (again after a fork)."""
    pid = os.getpid()
    return Process(
        host=platform.node(), pid=pid, namespace=_namespace(), start=_start_time(pid), token=_token(pid)
    )


@lru_cache(maxsize=1)
def _token(pid: int) -> str:
    """Another one after a fork."""
    return secrets.token_hex(8)


@lru_cache(maxsize=1)
def _namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the process's state on; none where it cannot be read."""
    try:
        # The second field is the command in parentheses, and may itself hold blanks and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str:
    return "".join(_stat(pid)[19:20])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A zombie counts as dead: it writes no more.
    return _stat(pid)[:1] != ["Z"]
