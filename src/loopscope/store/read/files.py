"""What lies in a run directory, and what of it can be believed."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loopscope.store.journal.decode import read_journal
from loopscope.store.names import (
    ATTEMPT_PART,
    JOURNAL_DIR,
    TABLES_DIR,
    Segment,
    parse_journal,
    parse_ledger,
    parse_part,
)
from loopscope.store.parts.ledger import Ledger, read_ledger


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a run; its rows are left out, never guessed."""

    kind: str
    """manifest, attempt, journal, part, schema, link, live or key."""
    where: str
    """File or table, relative to the run."""
    text: str
    """What is wrong and what it costs."""
    lost_rows: int | None = None
    """Rows known to be lost; None where that cannot be told."""

    def __str__(self) -> str:
        lost = "" if self.lost_rows is None else f" [{self.lost_rows} row(s) lost]"
        return f"{self.where}: {self.text}{lost}"


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A sealed part by its name."""

    path: Path
    table: str
    segment: Segment
    crc: int


@dataclass
class RunFiles:
    """The files of a run at one moment."""

    root: Path
    parts: dict[str, list[SealedPart]] = field(default_factory=dict)
    """Table → parts in order; one per segment."""
    journals: dict[Segment, bytes] = field(default_factory=dict)
    """Content of the journals that are not sealed yet."""
    ledgers: dict[Segment, Ledger] = field(default_factory=dict)
    """What sealing made, per segment."""
    damaged: list[str] = field(default_factory=list)
    """Journals that were kept because some of their rows could not be sealed."""
    problems: list[Problem] = field(default_factory=list)


def scan_files(root: Path) -> RunFiles:
    """List a run directory. Journals are read first, so that one being sealed meanwhile is not missed."""
    files = RunFiles(root)
    _scan_journals(files)
    _scan_tables(files)
    return files


def scan_parts(root: Path) -> RunFiles:
    """The sealed parts alone; no file is opened."""
    files = RunFiles(root)
    _scan_tables(files)
    return files


def _scan_tables(files: RunFiles) -> None:
    tables = files.root / TABLES_DIR
    for name in _names(tables):
        folder = tables / name
        if folder.is_symlink():
            files.problems.append(_link(files.root, folder))
        elif folder.is_dir():
            _scan_table(files, name, folder)


def _scan_journals(files: RunFiles) -> None:
    folder = files.root / JOURNAL_DIR
    for name in _names(folder):
        if name.endswith(".wal.damaged"):
            files.damaged.append(name)
        path = folder / name
        sealed = parse_ledger(name)
        if sealed is not None and not path.is_symlink():
            try:
                files.ledgers[sealed] = read_ledger(path)
            except (OSError, ValueError) as error:
                text = f"cannot be believed ({error}); a part of it that vanished would not be missed"
                files.problems.append(Problem("journal", f"{JOURNAL_DIR}/{name}", text, 0))
        segment = parse_journal(name)
        if segment is None:
            continue
        try:
            if path.is_symlink():
                files.problems.append(_link(files.root, path))
                continue
            files.journals[segment] = read_journal(path)
        except FileNotFoundError:
            continue  # Sealed since we listed: its parts are found below.
        except OSError as error:
            text = f"cannot be read ({error.strerror or error}); its rows are left out"
            files.problems.append(Problem("journal", f"{JOURNAL_DIR}/{name}", text))


def _scan_table(files: RunFiles, table: str, folder: Path) -> None:
    chosen: dict[Segment, SealedPart] = {}
    for name in _names(folder):
        path = folder / name
        where = f"{TABLES_DIR}/{table}/{name}"
        parsed = parse_part(name)
        if parsed is None:
            if name != ATTEMPT_PART and name.endswith(".parquet"):
                text = "is not named as a part of this table is; its rows are left out"
                files.problems.append(Problem("part", where, text))
            continue
        if path.is_symlink():
            files.problems.append(_link(files.root, path))
            continue
        if not stat.S_ISREG(path.lstat().st_mode):
            continue
        segment, crc = parsed
        if segment in chosen:
            text = f"holds the same rows as {chosen[segment].path.name}; only that one is read"
            files.problems.append(Problem("part", where, text, 0))
            continue
        chosen[segment] = SealedPart(path, table, segment, crc)
    if chosen:
        files.parts[table] = [chosen[s] for s in sorted(chosen)]


def _link(root: Path, path: Path) -> Problem:
    return Problem(
        "link", str(path.relative_to(root)), "is a symbolic link; a run holds its own files; left out"
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names alone are wanted
    except (FileNotFoundError, NotADirectoryError):
        return []


def segments_by_attempt(parts: Mapping[str, list[SealedPart]]) -> dict[int, set[str]]:
    """Attempt → tables that have a part of it."""
    found: dict[int, set[str]] = {}
    for table, table_parts in parts.items():
        for part in table_parts:
            found.setdefault(part.segment.attempt, set()).add(table)
    return found


def last_seq(root: Path, attempt: int, writer: str) -> int:
    """The highest sequence number that a writer's files have: its next file takes the one behind it."""
    prefix = f"{attempt:05d}-{writer}-"
    names = [p.name for p in (root / JOURNAL_DIR).glob(f"{prefix}*")]
    names += [p.name[5:] for p in (root / TABLES_DIR).glob(f"*/part-{prefix}*")]
    numbers = [n[len(prefix) :].split("-")[0].split(".")[0] for n in names]
    return max([0, *(int(n) for n in numbers if n.isdigit())])
