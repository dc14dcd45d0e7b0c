"""The sealed files of a run at one moment, in an order in which nothing ever refers to what is not there yet.

On the disk, files are made in this order: the record of an attempt, its parts, the ledger that counts them, the table
that says which of them are live, run.json. They are listed here in the opposite order, so that whatever a listed file
refers to is listed too, and put back into the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from loopscope.errors import StoreError
from loopscope.store.names import (
    ATTEMPT_PART,
    ATTEMPTS_DIR,
    JOURNAL_DIR,
    MANIFEST,
    TABLES_DIR,
    Segment,
    newest_of,
    parse_part,
)
from loopscope.store.seal.attempt_table import attempt_table


class Stage(IntEnum):
    """When a file may be copied: after all files of the smaller stages."""

    ATTEMPT = 0
    BEGIN = 1
    """What makes an empty folder a run without a row: run.json, and an attempt table without a live attempt."""
    PART = 2
    LEDGER = 3
    LIVE = 4
    """The attempt table, which is rewritten when something is sealed."""
    MANIFEST = 5


@dataclass(frozen=True, slots=True)
class SealedFile:
    """One file to be copied."""

    stage: Stage
    name: str
    """Relative to the run, with slashes."""
    path: Path
    state: tuple[int, int]
    """When it changed last, in ns, and its size in bytes."""
    data: bytes | None = None
    """Its content at that moment, where it is replaced; None where it never changes."""

    @property
    def chain(self) -> tuple[int, str] | None:
        """Whose parts it belongs to: without an older one of them, a newer one leaves a gap. None for anything else."""
        segment = _segment(self.name) if self.stage is Stage.PART else None
        return None if segment is None else segment.chain

    def content(self) -> bytes:
        """What is to be copied. Raises OSError."""
        return self.path.read_bytes() if self.data is None else self.data


def sealed_files(root: Path, *, only: str | None = None, begin: bool = False) -> list[SealedFile]:
    """What is sealed now, in the order in which it may be copied. Nothing before the first attempt is claimed.

    Args:
        root: the run directory.
        only: a writer whose parts and ledgers alone are wanted, and the attempts they belong to; None for everything.
        begin: the copy does not hold the run yet.
    """
    found: list[SealedFile] = []
    writer = "*" if only is None else f"*-{only}-*"
    if only is None:
        manifest = _replaced(root, Stage.MANIFEST, MANIFEST)
        live = _replaced(root, Stage.LIVE, f"{TABLES_DIR}/attempt/{ATTEMPT_PART}")
        if not manifest or not live:
            return []
        found = [*manifest, *live]
        found += _beginning(root, manifest[0], live[0]) if begin else []
    found += _listed(root, Stage.LEDGER, f"{JOURNAL_DIR}/{writer}.sealed")
    first, parts = ({f.name: f for f in _parts(root, writer)} for _ in range(2))
    # A segment's parts together: a copy that ends in the middle lacks whole segments, and the newest ones.
    found += sorted((parts[name] for name in settled(first, parts)), key=_by_segment)
    found += _listed(root, Stage.ATTEMPT, f"{ATTEMPTS_DIR}/*.json")
    return sorted(found, key=lambda file: file.stage)


def settled(first: Iterable[str], second: Iterable[str]) -> list[str]:
    """The names that belong together, of two listings of the tables made one after the other while parts came in.

    A folder's listing is not of one moment: it may show a part and lack an older one. What came before a part that the
    first listing shows is all in the second one. Files that are not named as parts are kept: readers report them.
    """
    newest = newest_of(filter(None, map(_segment, first)))
    found = ((name, _segment(name)) for name in second)
    return [n for n, s in found if s is None or s.seq <= newest.get(s.chain, 0)]


def _segment(name: str) -> Segment | None:
    parsed = parse_part(name.rpartition("/")[2])
    return None if parsed is None else parsed[0]


def _parts(root: Path, writer: str) -> Iterator[SealedFile]:
    return _listed(root, Stage.PART, f"{TABLES_DIR}/*/part-{writer}.parquet")


def _beginning(root: Path, manifest: SealedFile, live: SealedFile) -> Iterator[SealedFile]:
    try:
        data = bytes(attempt_table(root))
    except (OSError, StoreError):
        return  # The run is being deleted, or run.json is damaged.
    yield replace(live, stage=Stage.BEGIN, state=(0, 0), data=data)
    yield replace(manifest, stage=Stage.BEGIN)


def _by_segment(file: SealedFile) -> tuple[Segment, str]:
    return _segment(file.name) or Segment(0, "", 0), file.name


def _listed(root: Path, stage: Stage, pattern: str) -> Iterator[SealedFile]:
    for path in sorted(root.glob(pattern)):
        try:
            stat = path.stat()
        except OSError:
            continue  # The run is being deleted.
        yield SealedFile(stage, path.relative_to(root).as_posix(), path, (stat.st_mtime_ns, stat.st_size))


def _replaced(root: Path, stage: Stage, name: str) -> list[SealedFile]:
    path = root / name
    try:
        # Its time is taken before its content: where it is replaced in between, it counts as changed the next time.
        stat = path.stat()
        data = path.read_bytes()
    except OSError:
        return []  # Not made yet.
    return [SealedFile(stage, name, path, (stat.st_mtime_ns, stat.st_size), data)]
