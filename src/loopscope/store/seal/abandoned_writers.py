"""What processes that died left in a run: journals to be sealed, and temporary files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from loopscope.store.locks import BEAT_S, HolderWatch
from loopscope.store.names import Segment, parse_journal

_STALE_S = 3600.0


class AbandonedWriters:
    """Announces the journals of earlier attempts, each once the process that wrote it is known to be gone.

    A process that was killed leaves its lock behind; so may one on another machine, which is watched until it is known.
    A task of the background thread: it never waits.

    Args:
        folder: of the journals.
        newest: the running attempt, which seals its journals itself.
        grace_s: see `HolderWatch`.
        announce: called with each journal's name.
    """

    def __init__(self, folder: Path, newest: int, grace_s: float, announce: Callable[[str], None]) -> None:
        self._waiting = {s: name for s, name in journals_in(folder).items() if s.attempt < newest}
        self._folder = folder
        self._watch = HolderWatch(grace_s)
        self._announce = announce
        self._every_s = min(BEAT_S, grace_s)
        self._next = 0.0

    def __call__(self) -> None:
        """Check those that are left; every few seconds only, as there may be hundreds on a slow disk."""
        now = time.monotonic()
        if not self._waiting or now < self._next:
            return
        self._next = now + self._every_s
        for segment in list(self._waiting):
            if writer_ended(self._folder, segment, self._watch):
                self._announce(self._waiting.pop(segment))


def journals_in(folder: Path) -> dict[Segment, str]:
    """The journals that are not sealed yet, in order, with their names."""
    found = {s: p.name for p in folder.glob("*.wal") if (s := parse_journal(p.name)) is not None}
    return {segment: found[segment] for segment in sorted(found)}


def writer_ended(folder: Path, segment: Segment, watch: HolderWatch) -> bool | None:
    """True: no process writes the segment's journal any more; False: one does; None: not known yet."""
    return watch.all_ended(folder, f"{segment.attempt:05d}-{segment.writer}.*.lock")


def sweep(folder: Path) -> None:
    """Remove temporary files that a process left when it died."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()
