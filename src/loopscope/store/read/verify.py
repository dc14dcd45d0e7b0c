"""Verification of a whole run directory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from loopscope.store.attempts import attempt_rows, live_ranges
from loopscope.store.manifest import Attempt
from loopscope.store.names import ATTEMPT_PART, JOURNAL_DIR, MANIFEST, TABLES_DIR, Segment, newest_of
from loopscope.store.read.files import Problem, RunFiles, attempts_that_count, scan_files
from loopscope.store.read.reader import RunReader

ATTEMPT_TABLE = f"{TABLES_DIR}/attempt/{ATTEMPT_PART}"


@dataclass
class Verification:
    """What was checked, and what is wrong."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    """Worth knowing, but no loss, such as what a crash leaves behind."""
    parts: int = 0
    journals: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """Table → rows that can be read, live or not."""
    live: dict[str, int] = field(default_factory=dict)
    """Table → live rows."""

    @property
    def lost_rows(self) -> int:
        """Rows known to be lost."""
        return sum(p.lost_rows or 0 for p in self.problems)


def verify_run(root: Path) -> Verification:
    """Check checksums, names, schemas, sequence numbers, keys and the live-row rule.

    Raises:
        NotARunError: the folder holds no run.
    """
    # Read first: what it is compared with may be newer then, in a run that is being written, and never older.
    attempt_table = _read_attempt_table(root)
    reader = RunReader(root)
    found = Verification(
        journals=len(reader.files.journals), parts=sum(map(len, reader.files.parts.values()))
    )
    for table in reader.tables:
        keys = reader.schema(table).primary_key
        rows = reader.read(table, live=False, columns=[*keys] or ["step"])
        live = reader.read(table, columns=[*keys] or ["step"])
        found.rows[table], found.live[table] = rows.num_rows, live.num_rows
        if keys:
            found.problems += _doubled(table, rows, keys, "within one attempt")
            # Of all attempts together one row per step is live.
            across = tuple(k for k in keys if k not in ("run_id", "attempt"))
            if table != "attempt":
                found.problems += _doubled(table, live, across, "among the live rows")
    found.problems += reader.check_all()
    found.problems += _missing_segments(reader)
    wrong, text = _judge_attempt_table(reader, attempt_table)
    if text:
        (found.problems if wrong else found.notes).append(
            Problem("live", ATTEMPT_TABLE, text, 0 if wrong else None)
        )
    if reader.manifest.rebuilt and not any(p.kind == "manifest" for p in found.problems):
        found.notes.append(
            Problem(
                "manifest",
                MANIFEST,
                "was rebuilt from the rows after it was lost: it lacks names, configuration and versions",
            )
        )
    return found


def _doubled(table: str, rows: pa.Table, keys: tuple[str, ...], where: str) -> list[Problem]:
    if not rows.num_rows or not keys:
        return []
    groups = rows.group_by(list(keys)).aggregate([([], "count_all")])
    counts = groups["count_all"].to_pylist()
    if max(counts) < 2:
        return []
    first = next(row for row in groups.to_pylist() if row["count_all"] > 1)
    key = ", ".join(f"{k}={first[k]}" for k in keys if k != "run_id")
    text = f"{sum(c > 1 for c in counts)} key(s) occur more than once {where}, the first at {key}"
    return [Problem("key", f"{TABLES_DIR}/{table}", text)]


def _missing_segments(reader: RunReader) -> list[Problem]:
    """Sequence numbers of a writer that left neither journal nor part nor ledger."""
    missing = _gaps(_segments(reader.files))
    if missing:
        # Files come in while they are listed: one listing may show a file and lack an older one.
        missing = sorted(set(missing) - _segments(scan_files(reader.root)))
    return [
        Problem("journal", f"{JOURNAL_DIR}/{segment.journal}", "neither it nor its parts are there")
        for segment in missing
    ]


def _segments(files: RunFiles) -> set[Segment]:
    return set(files.journals) | set(files.ledgers) | {p.segment for ps in files.parts.values() for p in ps}


def _gaps(there: set[Segment]) -> list[Segment]:
    numbered = (
        Segment(*chain, seq) for chain, newest in newest_of(there).items() for seq in range(1, newest)
    )
    return [segment for segment in numbered if segment not in there]


def _read_attempt_table(root: Path) -> list[dict[str, Any]] | Exception | None:
    """Its rows; why it cannot be read; None where it is not there."""
    try:
        # In one read: the file may be replaced between two reads.
        data = pa.BufferReader((root / ATTEMPT_TABLE).read_bytes())
        rows: list[dict[str, Any]] = pq.read_table(data, page_checksum_verification=True).to_pylist()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, pa.ArrowException) as error:
        return error
    return rows


def _judge_attempt_table(reader: RunReader, got: list[dict[str, Any]] | Exception | None) -> tuple[bool, str]:
    """(wrong, message): the derived table must equal what would be derived now.

    Between sealing a journal and rewriting the table a process may be killed, or still be at work: the table then is
    that of an earlier moment, which is out of date and not wrong.
    """
    if isinstance(got, Exception):
        return True, f"cannot be read ({got}); `loopscope seal` rewrites it"
    sealed = attempts_that_count(reader.files.parts, reader.schemas)
    if got is None:
        there = bool(reader.files.parts)
        return there, "is missing; `loopscope seal` rewrites it" if there else ""
    if got == _derived(reader, reader.attempts, max(sealed, default=None)):
        return False, ""
    before = reader.attempts[: len(got)]
    known = sorted({part.segment.attempt for parts in reader.files.parts.values() for part in parts})
    if any(got == _derived(reader, before, newest) for newest in (None, *known)):
        return False, (
            "is older than the newest sealed rows: another engine that joins it misses them until `loopscope seal`, or "
            "the next sealing, rewrites it"
        )
    return True, "does not match the sealed rows that are live now; `loopscope seal` rewrites it"


def _derived(reader: RunReader, attempts: Sequence[Attempt], newest: int | None) -> list[dict[str, Any]]:
    """What the table says once `attempts` were claimed and `newest` is the last with sealed rows."""
    ranges = live_ranges(attempts, set() if newest is None else {newest})
    rows = attempt_rows(reader.manifest.run_id, attempts, ranges)
    derived: list[dict[str, Any]] = pa.Table.from_pylist(
        rows, schema=reader.schema("attempt").arrow
    ).to_pylist()
    return derived
