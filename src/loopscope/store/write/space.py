"""How long the disk lasts at the rate at which a run grows: said before it is full, when a row can still say it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loopscope.store.names import JOURNAL_DIR, TABLES_DIR

LOOK_S = 60.0
SHORTEST_S = 300.0
"""A rate is taken over at least this long: a run's first minute says little."""
WARN_S = 86400.0
"""Less time than this left is a warning."""
CRITICAL_S = 3600.0
"""And less than this is critical."""

Severity = Literal["warn", "critical"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is said of a disk that is filling up."""

    severity: Severity
    hours: float
    """Left at the run's own rate; others may fill the disk sooner."""
    detail: str


class SpaceForecast:
    """Looks now and then, and says each step of getting worse once.

    Args:
        root: gives the run directory's path for system calls.
        clock: seconds that only rise.
        free: bytes that this user may still write on the disk of a path.
        used: bytes that the run takes.
    """

    def __init__(
        self,
        root: Callable[[], Path],
        *,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[Path], int] | None = None,
        used: Callable[[Path], int] | None = None,
    ) -> None:
        self._root, self._clock = root, clock
        self._free, self._used = free or free_bytes, used or run_bytes
        self._look_at = clock() + LOOK_S
        self._first: tuple[float, int] | None = None
        self._said: Severity | None = None

    def look(self) -> Forecast | None:
        """What is to be said now, if anything; looks at the disk at most once in `LOOK_S`.

        Raises:
            OSError: the folder is gone, or the disk does not answer.
        """
        now = self._clock()
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        root = self._root()
        used = self._used(root)
        if self._first is None:
            self._first = (now, used)
            return None
        since, before = self._first
        if now - since < SHORTEST_S or used <= before:
            return None
        rate, free = (used - before) / (now - since), self._free(root)
        left = free / rate
        severity: Severity | None = "critical" if left < CRITICAL_S else "warn" if left < WARN_S else None
        worse = severity is not None and (
            self._said is None or (severity, self._said) == ("critical", "warn")
        )
        self._said = severity
        if severity is None or not worse:
            return None
        text = (
            f"{_mebibytes(free)} are free, and this run alone takes {_mebibytes(rate * 3600)} an hour: about "
            f"{left / 3600:.1f} hours are left. Make space, or trace less often"
        )
        return Forecast(severity, left / 3600, text)


def free_bytes(root: Path) -> int:
    """Bytes that this user may still write there."""
    disk = os.statvfs(root)
    return disk.f_bavail * disk.f_frsize


def run_bytes(root: Path) -> int:
    """Bytes of a run's journals and parts."""
    tables = root / TABLES_DIR
    folders = [
        root / JOURNAL_DIR,
        *(tables.iterdir() if tables.is_dir() else ()),
    ]
    total = 0
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    total += entry.stat(follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            continue  # sealed, or moved, while we looked
    return total


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"
