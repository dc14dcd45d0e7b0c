"""One owner per run and one process per writer, by files that are only ever created, never by flock.

A lock is `journal/<name>.<generation>.lock`; the highest generation holds it. Taking over creates the next
generation with O_EXCL, so that of several processes exactly one succeeds. A holder on another machine cannot be
asked whether it lives; it touches its file every few seconds, and is taken for dead when it stops.

The file also says how its holder fares (`status`). Once a writer has ended it is kept, as `attempts/<name>.<n>.end`.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from loopscope.errors import RunExistsError
from loopscope.store.disk import Disk, write_all
from loopscope.store.ids import this_process
from loopscope.store.names import ATTEMPTS_DIR
from loopscope.store.preemption import preempting, recorded_signals
from loopscope.store.status import Holder, Status, area_of, blank, plain_size, read_record, slot_of

__all__ = ["BEAT_S", "GRACE_S", "Holder", "HolderWatch", "Lock", "read_holder", "retire_ended", "take_lock"]

BEAT_S = 5.0
"""How often a holder touches its file."""
GRACE_S = 16.0
"""How long a holder on another machine is watched before it is taken for dead."""


class Lock:
    """A lock that this process holds until `release`. All of it goes by descriptor: the folder may be renamed."""

    def __init__(self, disk: Disk, path: Path, holder: Holder) -> None:
        """Take hold of the file that was just made; raises OSError."""
        self._disk, self._path, self.holder = disk, path, holder
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._pid = os.getpid()
        self._beaten = time.monotonic()
        self._mutex = threading.Lock()
        self.status = Status()

    def beat(self) -> None:
        """Show that the holder is alive: touches the file every `BEAT_S` at most, however often it is called."""
        now = time.monotonic()
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        with contextlib.suppress(OSError):
            os.utime(self._fd)

    def note(self, **changes: Any) -> None:
        """Change fields of the status, where they differ. What the disk refuses is lost until the next call."""
        if os.getpid() != self._pid:
            return
        with self._mutex:
            status = msgspec.structs.replace(self.status, **changes)
            if self._fd < 0 or (status == self.status and status.count):
                return
            status = msgspec.structs.replace(status, count=status.count + 1)
            with contextlib.suppress(OSError):
                self._disk.overwrite(self._fd, *slot_of(status))
                self.status = status

    def keep_hold(self) -> None:
        """Make the file anew where another process took it for a dead one's, and made a record of it.

        A process that was paused for long meets that. Nothing where somebody else holds the lock by now.
        """
        if os.getpid() != self._pid or self._fd < 0 or self.is_mine():
            return
        name, folder = self._path.name.partition(".")[0], self._path.parent
        with contextlib.suppress(OSError):
            if _locks_of(folder, name):
                return
            other = _create(self._disk, folder / f"{name}.1.lock", self.holder)
            with self._mutex:
                os.close(self._fd)
                self._path, self._fd, self.holder = other._path, other._fd, other.holder
            self.note(reclaimed=self.status.reclaimed + 1)

    def has_signal(self) -> bool:
        """True where a signal was recorded."""
        record = read_record(self._path) if self._fd >= 0 and self.is_mine() else None
        return record is not None and bool(record.signals)

    def open_blocks(self) -> dict[str, int]:
        """Signal → a descriptor of the file at the signal's block; the caller closes them. Raises OSError."""
        opened: dict[str, int] = {}
        for index, name in enumerate(self.holder.signals):
            opened[name] = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            os.lseek(opened[name], area_of(index), os.SEEK_SET)
        return opened

    def release(self, keep: str = "") -> None:
        """Give the lock back; nothing in a forked child, whose parent still holds it.

        Args:
            keep: attempt and writer under which the file is kept, as the record of what its holder said; empty removes
                it.
        """
        if os.getpid() != self._pid or self._fd < 0:
            return
        self.note(ended="closed")
        with self._mutex:
            fd, self._fd = self._fd, -1
        try:
            if not _is_file(self._path, fd):
                return  # Another process has made it a record, which is up to date, or removed it.
            with contextlib.suppress(OSError):
                if keep:
                    _keep(self._disk, self._path, keep)
                else:
                    self._disk.unlink(self._path)
        finally:
            os.close(fd)

    def is_mine(self) -> bool:
        """False where another process has taken the lock over, or made a record of it."""
        return self._fd >= 0 and _is_file(self._path, self._fd)


def take_lock(
    disk: Disk,
    folder: Path,
    name: str,
    run_id: str,
    *,
    grace_s: float = GRACE_S,
    preempted_by: Sequence[str] | None = None,
    where: Path | None = None,
) -> Lock:
    """Take the lock `name` in `folder`.

    Args:
        disk: where.
        folder: of the locks.
        name: "owner", or attempt and writer.
        run_id: of the run.
        grace_s: how long a holder that cannot be asked is watched.
        preempted_by: the scheduler's signs, whose signals the file has room for; None where it records none at all.
        where: the run directory, for people; the folder above where None.

    Raises:
        RunExistsError: a living process holds it.
        OSError: the disk refused.
    """
    while True:
        older = _locks_of(folder, name)
        newest = max(older, default=0)
        if older:
            _check_dead(older[newest], name, grace_s, where or folder.parent)
        path = folder / f"{name}.{newest + 1}.lock"
        signs = [] if preempted_by is None else preempted_by
        holder = Holder(
            process=this_process(),
            started=datetime.now(UTC),
            run_id=run_id,
            signals=[] if preempted_by is None else [*recorded_signals(signs)],
            preempting=preempting(signs),
        )
        try:
            lock = _create(disk, path, holder)
        except FileExistsError:
            continue  # Another process was faster: check that one.
        for left in older.values():
            with contextlib.suppress(OSError):
                # What a writer said is kept; the owner's own words are in its writer's record.
                disk.unlink(left) if name == "owner" else _keep(disk, left, name)
        return lock


def _create(disk: Disk, path: Path, holder: Holder) -> Lock:
    fd = disk.create(path)
    try:
        try:
            holder = msgspec.structs.replace(holder, inode=os.fstat(fd).st_ino)
            write_all(disk, fd, blank(holder))
            disk.fsync(fd)
        finally:
            disk.close(fd)
        disk.fsync_dir(path.parent)
        return Lock(disk, path, holder)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(path)
        raise


def _locks_of(folder: Path, name: str) -> dict[int, Path]:
    """Generation → file of the lock `name`; the highest holds it. Raises OSError."""
    pattern = re.compile(re.escape(name) + r"\.(\d{1,9})\.lock")
    names = os.listdir(folder)  # noqa: PTH208 - one call, one failure
    return {int(match[1]): folder / match[0] for n in names if (match := pattern.fullmatch(n))}


def retire_ended(disk: Disk, folder: Path, watch: "HolderWatch", before: int | None = None) -> bool:
    """Make records of the locks of writers that are known to be gone; True where no other lock is left.

    Args:
        disk: where.
        folder: of the locks.
        watch: knows which holders are gone.
        before: leaves out the locks of this attempt and of later ones.
    """
    left = False
    for path in sorted(folder.glob("*-*.*.lock")):
        number = path.name.partition("-")[0]
        if before is not None and not (number.isdigit() and int(number) < before):
            continue
        if watch.ended(path):
            with contextlib.suppress(OSError):
                _retire(disk, path)
        else:
            left = True
    return not left


def _retire(disk: Disk, path: Path) -> None:
    record = read_record(path)
    if record is None or record.holder is None:
        disk.unlink(path)
        return
    if record.alive() is False and not record.status.ended:
        # Seen from the machine that it ran on: after the next start nobody can ask any more.
        status = msgspec.structs.replace(record.status, count=record.status.count + 1, ended="died")
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            disk.overwrite(fd, *slot_of(status))
            # Its last sign of life stays the time of the file.
            os.utime(fd, ns=(record.touched_ns, record.touched_ns))
        finally:
            os.close(fd)
    _keep(disk, path, record.name)


def _keep(disk: Disk, path: Path, name: str) -> None:
    """Move a lock file to the records of attempts, without the blocks of signals that did not come."""
    record, folder = read_record(path), path.parent.parent / ATTEMPTS_DIR
    if record is None:
        return
    if not record.signals:
        with contextlib.suppress(OSError):
            os.truncate(path, plain_size())
            os.utime(path, ns=(record.touched_ns, record.touched_ns))
    number = 1
    while (target := folder / f"{name}.{number}.end").exists():
        number += 1
    disk.replace(path, target)


def _is_file(path: Path, fd: int) -> bool:
    """True where the path leads to the file of the descriptor."""
    try:
        there, held = path.stat(), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def read_holder(path: Path) -> Holder | None:
    """The holder that a lock file names; None where it cannot be read."""
    with contextlib.suppress(OSError):
        record = read_record(path)
        return None if record is None else record.holder
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
        try:
            record = read_record(path)
        except OSError:
            touched, alive = None, None  # Another user's, perhaps: only time can tell.
            with contextlib.suppress(OSError):
                touched = path.stat().st_mtime_ns
        else:
            if record is None:
                return True  # It gave the lock back.
            touched, alive = record.touched_ns, record.alive()
        if alive is not None:
            return not alive
        now = time.monotonic()
        first, since = self._seen.setdefault(path, (touched or 0, now))
        if (touched or 0) != first:
            self._seen[path] = touched or 0, now
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


def _check_dead(path: Path, name: str, grace_s: float, where: Path) -> None:
    """Return when the holder is gone; raise when it lives."""
    if HolderWatch(grace_s).wait(path.parent, path.name, min(0.5, grace_s)) or not path.exists():
        return
    record = read_record(path)
    owner = record.holder if record is not None else None
    if owner is None:
        raise RunExistsError(
            f"a lock of {where} ({name}) is held by a process that keeps touching it. Choose another folder."
        )
    same = owner.process.pid == os.getpid()
    raise RunExistsError(
        f"{where} is being written ({name}) by {'this very' if same else 'another'} process: "
        f"run {owner.run_id}, host {owner.process.host}, pid {owner.process.pid}, started "
        f"{owner.started.isoformat(timespec='seconds')}. Expected no other writer. Choose another folder, or end "
        "that process first."
    )
