"""Sealing whatever a run still holds in journals."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from loopscope.errors import StoreError
from loopscope.store.disk import LOCAL_DISK
from loopscope.store.live_table import refresh_attempt_table
from loopscope.store.locks import is_held
from loopscope.store.manifest import read_manifest, write_manifest
from loopscope.store.names import JOURNAL_DIR, MANIFEST, Segment, parse_journal
from loopscope.store.reader import RunReader
from loopscope.store.seal import Sealed, seal_journal

_STALE_S = 3600.0


@dataclass
class SealReport:
    """What sealing a run did."""

    sealed: list[Sealed] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    """Journals that a living process writes; left alone."""
    failures: list[str] = field(default_factory=list)
    """Journals that could not be sealed, with the reason; they are still there."""
    restored: str | None = None
    """Why run.json was put together anew from the rows; None where nothing was wrong with it."""


def seal_run(root: Path) -> SealReport:
    """Seal every journal that nobody writes, and write the table of attempts anew.

    A run.json that is missing or damaged is put together from the rows first, so that the run can be resumed; the
    damaged one is kept as run.json.damaged. A writer on another machine cannot be seen: its newest journal counts as
    being written while its lock is there, and is sealed once the lock was taken over or removed.

    Raises:
        NotARunError: the folder holds no run.
    """
    report = SealReport()
    folder = root / JOURNAL_DIR
    if not _restore_manifest(root, report):
        return report
    names = {s: p.name for p in folder.glob("*.wal") if (s := parse_journal(p.name)) is not None}
    for segment in sorted(names):
        if _is_written(folder, segment, names):
            report.busy.append(names[segment])
            continue
        try:
            report.sealed.append(seal_journal(root, names[segment]))
        except FileNotFoundError:
            continue  # Sealed by somebody else meanwhile.
        except (OSError, StoreError) as error:
            report.failures.append(f"{names[segment]}: {error}")
    _sweep(folder)
    try:
        refresh_attempt_table(root)
    except (OSError, StoreError) as error:
        report.failures.append(f"the table of attempts: {error}")
    return report


def _restore_manifest(root: Path, report: SealReport) -> bool:
    """True where run.json can be read, at the end."""
    try:
        read_manifest(root)
    except StoreError as error:
        rebuilt = RunReader(root).manifest  # NotARunError where there is nothing to rebuild it from.
        if any(is_held(path) for path in (root / JOURNAL_DIR).glob("owner.*.lock")):
            report.failures.append(
                f"{MANIFEST}: {error}. A living process owns the run; seal it once that has ended"
            )
            return False
        with contextlib.suppress(FileNotFoundError):
            LOCAL_DISK.replace(root / MANIFEST, root / f"{MANIFEST}.damaged")
        write_manifest(LOCAL_DISK, root, rebuilt)
        report.restored = str(error)
    return True


def _sweep(folder: Path) -> None:
    """Remove temporary files that a process left when it died."""
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def _is_written(folder: Path, segment: Segment, names: dict[Segment, str]) -> bool:
    """Only a writer's newest journal can be open; older ones were left to be sealed."""
    newest = max(s.seq for s in names if (s.attempt, s.writer) == (segment.attempt, segment.writer))
    if segment.seq < newest:
        return False
    return any(is_held(path) for path in folder.glob(f"{segment.attempt:05d}-{segment.writer}.*.lock"))
