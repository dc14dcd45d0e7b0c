"""One owner per run and one process per writer, by files that are only ever created, never by flock.

A lock is `journal/<name>.<generation>.lock`; the highest generation holds it. Taking over creates the next
generation with O_EXCL, so that of several processes exactly one succeeds. A holder on another machine cannot be
asked whether it lives; it touches its file every few seconds, and is taken for dead when it stops.
"""

import contextlib
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loopscope.errors import RunExistsError
from loopscope.store.disk import Disk, create_file
from loopscope.store.ids import Process, this_process

BEAT_S = 5.0
"""How often a holder touches its file."""
GRACE_S = 16.0
"""How long a holder on another machine is watched before it is taken for dead."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What a lock file says."""

    process: Process
    started: datetime
    run_id: str


class Lock:
    """A lock that this process holds until `release`."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._pid = os.getpid()
        self._beaten = time.monotonic()

    def beat(self) -> None:
        """Show that the holder is alive: touches the file every `BEAT_S` at most, however often it is called."""
        now = time.monotonic()
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def release(self) -> None:
        """Give the lock back; nothing in a forked child, whose parent still holds it."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._disk.unlink(self._path)


def take_lock(disk: Disk, folder: Path, name: str, run_id: str, *, grace_s: float = GRACE_S) -> Lock:
    """Take the lock `name` in `folder`.

    Raises:
        RunExistsError: a living process holds it.
        OSError: the disk refused.
    """
    while True:
        older = _locks_of(folder, name)
        newest = max(older, default=0)
        if older:
            _check_dead(older[newest], name, grace_s)
        path = folder / f"{name}.{newest + 1}.lock"
        holder = Holder(process=this_process(), started=datetime.now(UTC), run_id=run_id)
        try:
            create_file(disk, path, msgspec.json.encode(holder))
        except FileExistsError:
            continue  # Another process was faster: check that one.
        for left in older.values():
            with contextlib.suppress(OSError):
                disk.unlink(left)
        return Lock(disk, path)


def _locks_of(folder: Path, name: str) -> dict[int, Path]:
    """Generation → file of the lock `name`; the highest holds it. Raises OSError."""
    pattern = re.compile(re.escape(name) + r"\.(\d{1,9})\.lock")
    names = os.listdir(folder)  # noqa: PTH208 - one call, one failure
    return {int(match[1]): folder / match[0] for n in names if (match := pattern.fullmatch(n))}


def read_holder(path: Path) -> Holder | None:
    """The holder that a lock file names; None where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None


class HolderWatch:
    """Whether the processes that hold locks have ended, for a caller that can ask again.

    Args:
        grace_s: how long a holder on another machine must not touch its file before it is taken for dead.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._seen: dict[Path, tuple[int, float]] = {}

    def ended(self, path: Path) -> bool | None:
        """True: the holder of this lock file is gone; False: it lives; None: not known yet."""
        holder = read_holder(path)
        alive = holder.process.alive() if holder is not None else None
        if alive is not None:
            return not alive
        touched, now = _touched(path), time.monotonic()
        if touched is None:
            return True  # It gave the lock back.
        first, since = self._seen.setdefault(path, (touched, now))
        if touched != first:
            self._seen[path] = touched, now
            return False
        return True if now - since >= self._grace_s else None

    def all_ended(self, folder: Path, pattern: str) -> bool | None:
        """The same of every lock file that matches a pattern: False where any holder lives."""
        answers = [self.ended(path) for path in folder.glob(pattern)]
        return False if False in answers else None if None in answers else True

    def wait(self, folder: Path, pattern: str, every_s: float = 0.5) -> bool:
        """The same, asked again until it is known."""
        while (ended := self.all_ended(folder, pattern)) is None:
            time.sleep(every_s)
        return ended


def _check_dead(path: Path, name: str, grace_s: float) -> None:
    """Return when the holder is gone; raise when it lives."""
    if HolderWatch(grace_s).wait(path.parent, path.name, min(0.5, grace_s)) or not path.exists():
        return
    owner = read_holder(path)
    if owner is None:
        raise RunExistsError(f"{path} is held by a process that keeps touching it. Choose another folder.")
    same = owner.process.pid == os.getpid()
    raise RunExistsError(
        f"{path.parent.parent} is being written ({name}) by {'this very' if same else 'another'} process: "
        f"run {owner.run_id}, host {owner.process.host}, pid {owner.process.pid}, started "
        f"{owner.started.isoformat(timespec='seconds')}. Expected no other writer. Choose another folder, or end "
        "that process first."
    )


def _touched(path: Path) -> int | None:
    # Opening first makes a network filesystem look again instead of answering from its cache.
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
