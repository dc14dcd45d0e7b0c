"""Whether a run is being written, was closed, or was left by a writer that died."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from loopscope.store.locks import GRACE_S, read_holder
from loopscope.store.names import JOURNAL_DIR

Liveness = Literal["live", "finished", "crashed"]


def liveness(path: Path) -> Liveness:
    """Judged by the writers' locks: a holder that lives, none, or one that is gone.

    A holder on another machine cannot be asked; it touches its lock every few seconds while it lives.
    """
    locks = list((path / JOURNAL_DIR).glob("*.lock"))
    if any(_alive(lock) for lock in locks):
        return "live"
    return "crashed" if locks or any((path / JOURNAL_DIR).glob("*.wal")) else "finished"


def _alive(lock: Path) -> bool:
    holder = read_holder(lock)
    alive = None if holder is None else holder.process.alive()
    if alive is not None:
        return alive
    with suppress(OSError):
        # Either way: a clock that jumped back must not let a dead writer live until it has caught up.
        return abs(time.time() - lock.stat().st_mtime) < GRACE_S
    return False
