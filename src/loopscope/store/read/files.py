"""The files of a run directory: journals, ledgers, parts, and what does not belong there; what makes a part right."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from loopscope.errors import SchemaError
from loopscope.store.checksum import decode_document
from loopscope.store.journal.file import read_journal
from loopscope.store.names import (
    ATTEMPT_PART,
    JOURNAL_DIR,
    TABLES_DIR,
    Segment,
    parse_journal,
    parse_ledger,
    parse_part,
)
from loopscope.store.parts.parquet import Ledger, PartMeta, arrow_source, file_crc
from loopscope.store.schema import TableSchema


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a run; its rows are left out, never guessed."""

    kind: str
    """manifest, attempt, journal, part, schema, link, live or key."""
    where: str
    """File or table, relative to the run."""
    text: str
    """What is wrong, and what is left out because of it."""
    lost_rows: int | None = None
    """Rows known to be lost; None where that is not known."""
    table: str = ""
    """The table whose rows they are, where the file is one of several tables."""

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

    @property
    def where(self) -> str:
        """The file, relative to the run."""
        return f"{TABLES_DIR}/{self.table}/{self.path.name}"


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

    def unreadable(self, kind: str, path: Path, error: OSError) -> None:
        """Note what could not be listed or opened."""
        text = f"cannot be read ({error.strerror or error}); its rows are left out"
        self.problems.append(Problem(kind, path.relative_to(self.root).as_posix(), text))


def scan_files(root: Path, *, journals: bool = True) -> RunFiles:
    """List a run directory.

    Args:
        root: the run directory.
        journals: False lists the parts alone; no file is opened then.
    """
    files = RunFiles(root)
    if journals:
        # Read first, so that one that is being sealed meanwhile is not missed: its parts are found below.
        for name in _names(files, JOURNAL_DIR):
            _scan_journal(files, name)
    for name in _names(files, TABLES_DIR):
        _scan_table(files, name, root / TABLES_DIR / name)
    return files


def _scan_journal(files: RunFiles, name: str) -> None:
    path, where = files.root / JOURNAL_DIR / name, f"{JOURNAL_DIR}/{name}"
    if name.endswith(".wal.damaged"):
        files.damaged.append(name)
    elif (segment := parse_ledger(name)) is not None:
        try:
            files.ledgers[segment] = decode_document(path.read_bytes(), Ledger)
        except (OSError, ValueError) as error:
            text = f"cannot be read ({error}); a part of it that vanished would not be missed"
            files.problems.append(Problem("journal", where, text, 0))
    elif (segment := parse_journal(name)) is not None:
        try:
            files.journals[segment] = read_journal(path)
        except OSError as error:
            if _is_link(path) or not isinstance(error, FileNotFoundError):  # else sealed since we listed
                files.unreadable("journal", path, error)


def _scan_table(files: RunFiles, table: str, folder: Path) -> None:
    chosen: dict[Segment, SealedPart] = {}
    for name in _names(files, f"{TABLES_DIR}/{table}"):
        path = folder / name
        parsed = parse_part(name)
        if parsed is None:
            if name != ATTEMPT_PART and name.endswith(".parquet"):
                text = "is not named as a part of this table is; its rows are left out"
                files.problems.append(Problem("part", f"{TABLES_DIR}/{table}/{name}", text))
            continue
        # A link is followed (caches and data versioning keep runs so): what a part holds is proven by its name.
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                files.problems.append(Problem("part", f"{TABLES_DIR}/{table}/{name}", "is no file; left out"))
                continue
        except OSError as error:
            files.unreadable("part", path, error)
            continue
        part = SealedPart(path, table, *parsed)
        if (first := chosen.setdefault(part.segment, part)) is not part:
            files.problems.append(
                Problem(
                    "part", part.where, f"holds the same rows as {first.path.name}; only that one is read", 0
                )
            )
    if chosen:
        files.parts[table] = [chosen[s] for s in sorted(chosen)]


def _names(files: RunFiles, folder: str) -> list[str]:
    path = files.root / folder
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 - names alone are wanted
    except NotADirectoryError:
        return []
    except OSError as error:
        if _is_link(path) or not isinstance(error, FileNotFoundError):
            files.unreadable("part" if folder.startswith(TABLES_DIR) else "journal", path, error)
        return []


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # of a folder that may not be entered
        return False


def attempts_with_progress(
    parts: Mapping[str, list[SealedPart]], tables: Mapping[str, TableSchema]
) -> set[int]:
    """Attempts that have a part of a table whose rows show that training went on."""
    progress = [found for name, found in parts.items() if name in tables and tables[name].progress]
    return {part.segment.attempt for found in progress for part in found}


def attempts_that_count(parts: Mapping[str, list[SealedPart]], tables: Mapping[str, TableSchema]) -> set[int]:
    """Attempts with progress. Where none has any, those with a row: all that a run has are then its events, and a
    training that could not be observed must not read as one that has nothing to say."""
    return attempts_with_progress(parts, tables) or {
        part.segment.attempt for found in parts.values() for part in found
    }


def last_seq(root: Path, attempt: int, writer: str) -> int:
    """The highest sequence number that a writer's files have: its next file takes the one behind it."""
    prefix = f"{attempt:05d}-{writer}-"
    names = [p.name for p in (root / JOURNAL_DIR).glob(f"{prefix}*")]
    names += [p.name[5:] for p in (root / TABLES_DIR).glob(f"*/part-{prefix}*")]
    numbers = [n[len(prefix) :].split("-")[0].split(".")[0] for n in names]
    return max([0, *(int(n) for n in numbers if n.isdigit())])


@dataclass(frozen=True, slots=True)
class VerifiedPart:
    """The metadata and the columns of a part that passed every check."""

    meta: PartMeta
    columns: frozenset[str]
    """Names of its columns, known to the registry or not."""


def verify_part(part: SealedPart, run_id: str, schema: TableSchema | None) -> VerifiedPart:
    """The part's metadata and columns, once its checksum, its name and its types were found to be right.

    Raises:
        SchemaError: its table's version is older than what this version of loopscope reads.
        ValueError: the part does not pass; the text says why.
        OSError: it cannot be read.
    """
    found = file_crc(part.path)
    if found != part.crc:
        raise ValueError(f"the CRC-32 of its content is {found:08x}, its name says {part.crc:08x}")
    arrow = pq.read_schema(arrow_source(part.path))
    meta = PartMeta.decode(arrow.metadata)
    said = (meta.table, meta.run_id, meta.attempt, meta.writer, meta.seq)
    named = (part.table, run_id, part.segment.attempt, part.segment.writer, part.segment.seq)
    if said != named:
        raise ValueError(
            f"its name and its metadata disagree: the metadata says {said}, expected {named} "
            "(table, run, attempt, writer, seq)"
        )
    if schema is not None and meta.schema_version < schema.oldest:
        raise SchemaError(
            f"holds table {part.table!r} at schema version {meta.schema_version}, written by loopscope "
            f"{meta.loopscope_version}; this version reads version {schema.oldest} and later. Read or compact the run "
            "with the version that wrote it"
        )
    if schema is not None and not arrow.equals(schema.arrow):
        for field in schema.arrow:
            index = arrow.get_field_index(field.name)
            if index >= 0 and arrow.field(index).type != field.type:
                got = arrow.field(index).type
                raise ValueError(f"its column {field.name!r} is {got}, expected {field.type}")
    return VerifiedPart(meta, frozenset(arrow.names))
