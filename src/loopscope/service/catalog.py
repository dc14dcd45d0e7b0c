"""Which runs lie under a folder. A client names a run by a key made here, never by a path."""

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from loopscope.analysis.liveness import Liveness, liveness
from loopscope.errors import StoreError
from loopscope.store import read_manifest
from loopscope.store.names import MANIFEST

_DEPTH = 4
_MOST = 5000
_FRESH_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """A run of the catalog."""

    key: str
    """Sixteen hexadecimal digits: what addresses of this run are made of."""
    path: Path
    place: str
    """The path below the root, for people."""
    name: str
    run_id: str
    created: datetime | None
    problem: str = ""
    """Why run.json cannot be read; empty where it can."""

    def state(self) -> Liveness:
        """Its state as of now."""
        return liveness(self.path)

    def is_gone(self) -> bool:
        """True once run.json is no more: the run is deleted, or about to be."""
        return not (self.path / MANIFEST).exists()

    def version(self) -> str:
        """Changes whenever a file of the run does; "gone" where the folder is no more."""
        try:
            signs = sorted(_signs(self.path))
        except OSError:
            return "gone"
        return hashlib.sha256(repr(signs).encode()).hexdigest()[:20] if signs else "gone"


class Catalog:
    """Looks at most once a second, and reads a run.json again only where it changed."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._entries: dict[str, CatalogEntry] = {}
        self._seen: dict[Path, tuple[int, int, CatalogEntry]] = {}
        self._looked = -_FRESH_S
        self._lock = threading.Lock()
        self.truncated = False
        """True where more runs lie under the root than are listed."""

    def entries(self) -> list[CatalogEntry]:
        """Every run, the newest first."""
        with self._lock:
            if time.monotonic() - self._looked >= _FRESH_S:
                self._look()
                self._looked = time.monotonic()
            return list(self._entries.values())

    def find(self, key: str) -> CatalogEntry | None:
        """The run of a key; None where there is none (any more)."""
        self.entries()
        return self._entries.get(key)

    def _look(self) -> None:
        manifests = list(itertools.islice(_manifests(self.root), _MOST + 1))
        self.truncated = len(manifests) > _MOST
        seen: dict[Path, tuple[int, int, CatalogEntry]] = {}
        for path, stat in manifests[:_MOST]:
            sign = (stat.st_mtime_ns, stat.st_size)
            known = self._seen.get(path)
            entry = known[2] if known is not None and known[:2] == sign else self._entry(path.parent)
            seen[path] = (*sign, entry)
        self._seen = seen
        found = sorted(
            (entry for *_, entry in seen.values()),
            key=lambda e: (e.created is not None, e.created and e.created.timestamp()),
            reverse=True,
        )
        self._entries = {entry.key: entry for entry in found}

    def _entry(self, path: Path) -> CatalogEntry:
        place = path.relative_to(self.root).as_posix()
        key = hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
        named = partial(CatalogEntry, key=key, path=path, place=place)
        try:
            manifest = read_manifest(path)
        except StoreError as error:
            return named(name=path.name, run_id="", created=None, problem=str(error))
        return named(name=manifest.run_name or path.name, run_id=manifest.run_id, created=manifest.created)


def _manifests(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """run.json files below the root. A link to a folder is followed where both have one owner: nobody else's link shows
    what they may not read themselves."""
    folders = [(root, 0)]
    seen: set[tuple[int, int]] = set()
    while folders:
        folder, depth = folders.pop()
        manifest = folder / MANIFEST
        try:
            there = folder.stat()
            if (place := (there.st_dev, there.st_ino)) in seen:
                continue  # A link to a folder around it.
            seen.add(place)
            if manifest.is_file() and not manifest.is_symlink():
                yield manifest, manifest.stat()
                continue  # What lies in a run is the run's.
            if depth < _DEPTH:
                with os.scandir(folder) as inside:
                    folders += [(Path(e.path), depth + 1) for e in inside if e.is_dir() and _is_ours(e)]
        except OSError:
            continue  # Deleted while we looked, or not ours to read.


def _is_ours(entry: os.DirEntry[str]) -> bool:
    if not entry.is_symlink():
        return True
    return entry.stat(follow_symlinks=False).st_uid == entry.stat().st_uid


def _signs(path: Path) -> Iterator[tuple[str, int, int]]:
    tables = path / "tables"
    of_tables = tables.iterdir() if tables.is_dir() else ()
    for folder in (path, path / "journal", path / "attempts", *of_tables):
        if folder.is_dir():
            for entry in os.scandir(folder):
                # A holder of a lock touches it every few seconds: that changes no row.
                if entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    yield entry.name, stat.st_size, 0 if entry.name.endswith(".lock") else stat.st_mtime_ns
