"""Sealing all journals of a run that no process writes any more, and sweeping up what processes that died left."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loopscope.errors import NotARunError, StoreError
from loopscope.store.disk import LOCAL_DISK
from loopscope.store.locks import BEAT_S, GRACE_S, HolderWatch, retire_ended
from loopscope.store.manifest import read_manifest, write_manifest
from loopscope.store.names import JOURNAL_DIR, MANIFEST, Segment, newest_of, parse_journal
from loopscope.store.read.reader import RunReader
from loopscope.store.seal.attempt_table import refresh_attempt_table
from loopscope.store.seal.seal_journal import Sealed, try_to_seal

_LOOK_S = 0.5


@dataclass
class SealReport:
    """What sealing a run did."""

    sealed: list[Sealed] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    """Journals that a living process writes; left alone."""
    failures: list[str] = field(default_factory=list)
    """Journals that could not be sealed, with the reason; they are still there."""
    restored: str | None = None
    """Why run.json was rebuilt from the rows; None where nothing was wrong with it."""


def seal_run(root: Path) -> SealReport:
    """Seal every journal that no process writes, and rewrite the attempt table.

    A run.json that is missing or damaged is rebuilt from the rows first, so that the run can be resumed; the
    damaged one is kept as run.json.damaged. A writer on another machine cannot be seen: its lock is watched for some
    seconds, and counts as that of a dead process where it is not touched.

    Raises:
        NotARunError: the folder holds no run.
    """
    report = SealReport()
    folder = root / JOURNAL_DIR
    if not _restore_manifest(root, report):
        return report
    watch = HolderWatch(GRACE_S)
    for segment, written in _journals(folder, watch):
        if written:
            report.busy.append(segment.journal)
        elif sealed := try_to_seal(root, segment.journal, report.failures):
            report.sealed.append(sealed)
    # How they ended is kept as a record; what nobody has watched for long enough stays a lock.
    retire_ended(LOCAL_DISK, folder, watch)
    sweep(folder)
    try:
        refresh_attempt_table(root)
    except (OSError, StoreError) as error:
        report.failures.append(f"the attempt table: {error}")
    return report


def _restore_manifest(root: Path, report: SealReport) -> bool:
    """True where run.json can be read, at the end."""
    try:
        read_manifest(root)
    except StoreError as error:
        rebuilt = RunReader(root).manifest  # NotARunError where there is nothing to rebuild it from.
        if not HolderWatch(GRACE_S).wait(root / JOURNAL_DIR, "owner.*.lock"):
            report.failures.append(
                f"{MANIFEST}: {error}. A living process owns the run; seal it once that has ended"
            )
            return False
        with contextlib.suppress(FileNotFoundError):
            LOCAL_DISK.replace(root / MANIFEST, root / f"{MANIFEST}.damaged")
        write_manifest(LOCAL_DISK, root, rebuilt)
        report.restored = "it was missing" if isinstance(error, NotARunError) else str(error)
    return True


def _journals(folder: Path, watch: HolderWatch) -> Iterator[tuple[Segment, bool]]:
    """The journals in order, and whether a living process writes each. Waits where that must be watched."""
    waiting = list(journals_in(folder))
    newest = newest_of(waiting)
    while waiting:
        for segment in list(waiting):
            # Only a writer's newest journal can be open; older ones were left to be sealed.
            old = segment.seq < newest[segment.chain]
            ended = old or writer_ended(folder, segment, watch)
            if ended is not None:
                waiting.remove(segment)
                yield segment, not ended
        if waiting:
            time.sleep(_LOOK_S)


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
        self._folder, self._newest = folder, newest
        self._watch = HolderWatch(grace_s)
        self._locks_left = True
        self._announce = announce
        self._every_s = min(BEAT_S, grace_s)
        self._next = 0.0

    def __call__(self) -> None:
        """Check those that are left; every few seconds only, as there may be hundreds on a slow disk."""
        now = time.monotonic()
        if not (self._waiting or self._locks_left) or now < self._next:
            return
        self._next = now + self._every_s
        for segment in list(self._waiting):
            if writer_ended(self._folder, segment, self._watch):
                self._announce(self._waiting.pop(segment))
        if self._locks_left:
            self._locks_left = not retire_ended(LOCAL_DISK, self._folder, self._watch, self._newest)


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
