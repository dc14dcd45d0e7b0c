"""Everything that can be wrong with a run directory, looked for at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from loopscope.store.attempts import attempt_rows, live_ranges
from loopscope.store.files import Problem, segments_by_attempt
from loopscope.store.names import ATTEMPT_PART, JOURNAL_DIR, TABLES_DIR, Segment
from loopscope.store.parts import rows_to_arrow
from loopscope.store.reader import RunReader


@dataclass
class Verification:
    """What was checked, and what is wrong."""

    problems: list[Problem] = field(default_factory=list)
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
    reader = RunReader(root)
    found = Verification(journals=len(reader.files.journals))
    found.parts = sum(len(p) for p in reader.files.parts.values())
    for table in reader.tables:
        keys = reader.schema(table).primary_key
        rows = reader.read(table, live=False, columns=[*keys] or ["step"])
        live = reader.read(table, columns=[*keys] or ["step"])
        found.rows[table], found.live[table] = rows.num_rows, live.num_rows
        if keys:
            found.problems += _doubled(table, rows, keys, "within one attempt")
            # A live row is one per step whichever attempt wrote it.
            across = tuple(k for k in keys if k not in ("run_id", "attempt"))
            if table != "attempt":
                found.problems += _doubled(table, live, across, "among the live rows")
    found.problems += reader.check_all()
    found.problems += _missing_segments(reader)
    found.problems += _attempt_table(reader)
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
    files = reader.files
    there = set(files.journals) | set(files.ledgers) | {p.segment for ps in files.parts.values() for p in ps}
    last: dict[tuple[int, str], int] = {}
    for segment in there:
        key = (segment.attempt, segment.writer)
        last[key] = max(last.get(key, 0), segment.seq)
    return [
        Problem(
            "journal",
            f"{JOURNAL_DIR}/{Segment(attempt, writer, seq).journal}",
            "neither it nor its parts are there",
        )
        for (attempt, writer), newest in sorted(last.items())
        for seq in range(1, newest)
        if Segment(attempt, writer, seq) not in there
    ]


def _attempt_table(reader: RunReader) -> list[Problem]:
    """The derived table must say what it would say if it were derived now."""
    where = f"{TABLES_DIR}/attempt/{ATTEMPT_PART}"
    path = reader.root / where
    if not path.exists():
        if not reader.files.parts:
            return []
        return [Problem("live", where, "is missing; `loopscope seal` writes it anew", 0)]
    progress = {name for name, schema in reader.schemas.items() if schema.progress}
    sealed = segments_by_attempt(reader.files.parts)
    ranges = live_ranges(reader.attempts, {n for n, tables in sealed.items() if tables & progress})
    expected = attempt_rows(reader.manifest.run_id, reader.attempts, ranges)
    try:
        got = pq.read_table(path, page_checksum_verification=True).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        return [Problem("live", where, f"cannot be read ({error}); `loopscope seal` writes it anew", 0)]
    if got != rows_to_arrow(reader.schema("attempt"), expected, {}).to_pylist():
        text = "does not say which sealed rows are live now; `loopscope seal` writes it anew"
        return [Problem("live", where, text, 0)]
    return []
