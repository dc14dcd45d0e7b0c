"""Reading a run while it is written, after a crash, after rollbacks: sealed parts and what the journals hold."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loopscope.errors import NotARunError, SchemaError
from loopscope.store.attempts import (
    LiveRange,
    attempt_rows,
    live_ranges,
)
from loopscope.store.journal.decode import JournalColumns, decode_journal, holds_row_of
from loopscope.store.names import JOURNAL_DIR, Segment
from loopscope.store.parts.parquet import arrow_source, conform
from loopscope.store.read import left_out
from loopscope.store.read.files import (
    Problem,
    RunFiles,
    SealedPart,
    VerifiedPart,
    attempts_that_count,
    attempts_with_progress,
    scan_files,
    verify_part,
)
from loopscope.store.read.rebuild import open_attempts, open_manifest
from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES


class RunReader:
    """A run as it was when it was opened. Nothing is written, nothing is locked."""

    def __init__(
        self, path: str | Path, *, tables: Mapping[str, TableSchema] = TABLES, tells: bool = False
    ) -> None:
        """Open a run directory.

        Args:
            path: of the run. It is found again where the program has changed its folder.
            tables: the schema registry.
            tells: what an answer lacks is told with it (see `left_out`); without, `problems` alone has it.

        Raises:
            NotARunError: the folder holds no run.
            SchemaError: it holds one of a layout that this version reads no more.
        """
        self.root = Path(path).absolute()
        self.schemas, self._tells = tables, tells
        try:
            is_folder = self.root.is_dir()
        except OSError as error:  # a name that is too long, a folder on the way that may not be entered
            raise NotARunError(f"{path} is not a run: {error.strerror or error}.") from None
        if not is_folder:
            raise NotARunError(f"{path} is not a run: there is no such folder.")
        self.files: RunFiles = scan_files(self.root)
        self.problems: list[Problem] = list(self.files.problems)
        """What was found to be wrong so far: a table's parts are checked when it is read."""
        self._mutex = threading.RLock()
        self._verified: dict[Path, VerifiedPart | None] = {}
        """Part that was checked → what it says of itself; None where it did not pass."""
        self._checked_missing = False
        self._noted: set[Segment] = set()
        """Journals that are known to have been sealed damaged."""
        self._journal_rows: dict[Segment, dict[str, list[pa.Table]]] = {}
        self.manifest, problems = open_manifest(self.root, self.files, tables)
        self.problems += problems
        self.attempts, problems = open_attempts(self.root, self.manifest, self.files)
        for segment, ledger in sorted(self.files.ledgers.items()):
            self._lost_in_sealing(segment, ledger.lost)
        self.problems += problems
        with_rows = attempts_with_progress(self.files.parts, tables)
        progress = {name for name, schema in tables.items() if schema.progress}
        for segment, data in self.files.journals.items():
            if segment.attempt not in with_rows and holds_row_of(data, progress):
                with_rows.add(segment.attempt)
        if not with_rows:
            with_rows = attempts_that_count(self.files.parts, tables)
            with_rows |= {s.attempt for s, data in self.files.journals.items() if holds_row_of(data, tables)}
        self.live: dict[int, LiveRange] = live_ranges(self.attempts, with_rows)
        """Attempt → steps at which its rows are live."""

    @property
    def tables(self) -> list[str]:
        """Tables that have rows, in the registry's order."""
        found = set(self.files.parts)
        for segment in self.files.journals:
            found |= self._rows_of(segment).keys()
        if self.attempts:
            found.add("attempt")
        return [t for t in self.schemas if t in found]

    def read(self, table: str, *, live: bool = True, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of a table in the registry's schema; columns that were not written are null.

        Args:
            table: a name of the registry.
            live: True leaves out the rows that a rollback superseded; False gives every row.
            columns: the columns to read; None for all.

        Raises:
            SchemaError: the table or a column does not exist.
            UnreadableError: there are rows, and none of them can be read; where this reader tells.
        """
        schema = self.schema(table)
        wanted = list(schema.names if columns is None else columns)
        pieces = list(self.iterate(table, live=live, columns=wanted))
        self.tell(table, has_rows=any(piece.num_rows for piece in pieces), stacklevel=3)
        return pa.concat_tables(pieces) if pieces else schema.arrow.empty_table().select(wanted)

    def iterate(
        self, table: str, *, live: bool = True, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """The same, a file at a time."""
        schema = self.schema(table)
        wanted = list(schema.names if columns is None else columns)
        if unknown := [c for c in wanted if c not in schema.name_set]:
            raise SchemaError(
                f"table {table!r} has no column {unknown[0]!r}; it has {', '.join(schema.names)}"
            )
        if table == "attempt":
            rows = attempt_rows(self.manifest.run_id, self.attempts, self.live)
            yield pa.Table.from_pylist(rows, schema=schema.arrow).select(wanted)
            return
        needed = wanted if not live or "step" in wanted else [*wanted, "step"]
        target = pa.schema([schema.arrow.field(c) for c in needed])
        for part in self.parts(table, live=live):
            for piece in self.part_rows(part, target, live=live):
                yield piece.select(wanted)
        for attempt, chunk in self.journal_rows(table, live=live):
            piece = chunk.select(needed)
            yield (self.only_live(piece, attempt) if live else piece).select(wanted)

    def schema(self, table: str) -> TableSchema:
        """The registry's entry.

        Raises:
            SchemaError: there is none.
        """
        try:
            return self.schemas[table]
        except KeyError:
            raise SchemaError(
                f"there is no table {table!r}; expected one of {', '.join(self.schemas)}"
            ) from None

    def parts(self, table: str, *, live: bool = True) -> list[SealedPart]:
        """The sealed parts of a table that pass verification; the others become problems.

        With `live`, parts of attempts without a live row are left out.
        """
        wanted = [p for p in self.files.parts.get(table, ()) if not live or p.segment.attempt in self.live]
        with self._mutex:
            unknown = [part for part in wanted if part.path not in self._verified]
            if len(unknown) > 1:
                # Checksums take long, and release the interpreter's lock.
                with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                    list(pool.map(self._verify, unknown))
            return [part for part in wanted if self._verify(part) is not None]

    def columns_of(self, part: SealedPart) -> tuple[str, ...]:
        """The registry's columns that a part has; none where it does not pass verification."""
        verified = self._verify(part)
        there = () if verified is None else verified.columns
        return tuple(c for c in self.schema(part.table).names if c in there)

    def journal_rows(self, table: str, *, live: bool = True) -> list[tuple[int, pa.Table]]:
        """(attempt, rows) of what is not sealed yet; a segment whose part is there and whole is left out."""
        with self._mutex:
            ours = [p for p in self.files.parts.get(table, ()) if p.segment in self.files.journals]
            sealed = {part.segment for part in ours if self._verify(part) is not None}
            return [
                (segment.attempt, chunk)
                for segment in sorted(self.files.journals)
                if segment not in sealed and (not live or segment.attempt in self.live)
                for chunk in self._rows_of(segment).get(table, ())
            ]

    def tell(self, table: str, *, has_rows: bool, stacklevel: int = 1) -> None:
        """Say what was left out of a table that was just read, where this reader tells; see `left_out.tell`."""
        if self._tells and table != "attempt":
            self._missing_parts()
            problems = left_out.of_table(self.problems, table)
            left_out.tell(
                self.root,
                table,
                problems,
                has_rows=has_rows,
                was_there=table in self.files.parts or bool(self.files.journals),
                stacklevel=stacklevel + 1,
            )

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Tell nothing while the body runs: it says itself what is wrong."""
        before, self._tells = self._tells, False
        try:
            yield
        finally:
            self._tells = before

    def check_all(self) -> list[Problem]:
        """Check every file, and return all problems."""
        for part in chain.from_iterable(self.files.parts.values()):
            self._verify(part)
        for segment in self.files.journals:
            self._rows_of(segment)
        self._missing_parts()
        return self.problems

    def only_live(self, piece: pa.Table, attempt: int) -> pa.Table:
        """Those rows of one attempt that are live; the table needs its `step` column."""
        live = self.live[attempt]
        keep = pc.greater_equal(piece["step"], live.start)
        if live.end is not None:
            keep = pc.and_(keep, pc.less(piece["step"], live.end))
        return piece.filter(keep)

    def _problem(self, kind: str, where: str, text: str, lost: int | None = None, table: str = "") -> None:
        self.problems.append(Problem(kind, where, text, lost, table))

    def _verify(self, part: SealedPart) -> VerifiedPart | None:
        if part.path in self._verified:
            return self._verified[part.path]
        schema = self.schemas.get(part.table)
        try:
            verified = verify_part(part, self.manifest.run_id, schema)
        except SchemaError as error:
            self._verified[part.path] = None
            self._problem("schema", part.where, f"{error}; its rows are left out")
            return None
        except (OSError, ValueError, pa.ArrowException) as error:
            self._reject(part, str(error))
            return None
        self._verified[part.path] = verified
        version = verified.meta.schema_version
        if schema is not None and version > schema.version:
            extra = ", ".join(sorted(verified.columns - schema.name_set)) or "none"
            self._problem(
                "schema",
                part.where,
                f"has schema version {version}, this loopscope knows {schema.version}; columns left out: {extra}",
                0,
            )
        self._lost_in_sealing(part.segment, verified.meta.lost_rows)
        return verified

    def _lost_in_sealing(self, segment: Segment, rows: int) -> None:
        """Once per journal, though every part of it carries the count; a journal that is still there is read itself."""
        if rows and segment not in self._noted and segment not in self.files.journals:
            self._noted.add(segment)
            self._problem(
                "journal", f"{JOURNAL_DIR}/{segment.journal}", "was damaged when it was sealed", rows
            )

    def _reject(self, part: SealedPart, reason: str) -> None:
        self._verified[part.path] = None
        if part.segment in self.files.journals:
            self._problem("part", part.where, f"{reason}; its journal is read instead", 0)
            return
        ledger = self.files.ledgers.get(part.segment)
        lost = None if ledger is None else ledger.rows.get(part.table)
        self._problem("part", part.where, f"{reason}; its rows are left out", lost)

    def _missing_parts(self) -> None:
        if not self._checked_missing:
            self._checked_missing = True
            self.problems += left_out.missing_parts(self.files)

    def part_rows(
        self, part: SealedPart, target: pa.Schema | None = None, *, live: bool = True
    ) -> list[pa.Table]:
        """The rows of one part as one table; none where it cannot be read. `target` needs `step` for live rows."""
        target = self.schema(part.table).arrow if target is None else target
        try:
            with pq.ParquetFile(arrow_source(part.path), page_checksum_verification=True) as file:
                names = set(file.schema_arrow.names)
                table = file.read(columns=[c for c in target.names if c in names])
            rows = conform(table, target)
        except (OSError, ValueError, pa.ArrowException) as error:
            self._reject(part, f"cannot be read ({error})")
            return []
        return [self.only_live(rows, part.segment.attempt) if live else rows]

    def _rows_of(self, segment: Segment) -> dict[str, list[pa.Table]]:
        if segment not in self._journal_rows:
            self._journal_rows[segment] = self._decode(segment)
        return self._journal_rows[segment]

    def _decode(self, segment: Segment) -> dict[str, list[pa.Table]]:
        where = f"{JOURNAL_DIR}/{segment.journal}"
        columns = JournalColumns(self.schemas, {"run_id": self.manifest.run_id, "attempt": segment.attempt})
        content = decode_journal(segment.journal, self.files.journals[segment], self.schemas, columns)
        if (header := content.header) is not None:
            said = (header.run_id, header.attempt, header.writer)
            named = (self.manifest.run_id, segment.attempt, segment.writer)
            if said != named:
                text = f"its name and its header disagree: it says {said}, expected {named} (run, attempt, writer)"
                self._problem("journal", where, f"{text}; its rows are left out")
                return {}
        if content.refused:
            self._problem("schema", where, f"{content.refused}; its rows are left out")
        if content.faults or content.lost:
            self._problem("journal", where, "; ".join(content.faults), content.lost)
        rows = columns.tables()
        for table, count in columns.unknown_tables.items():
            self._problem(
                "schema",
                where,
                f"holds {count} row(s) of table {table!r}, which this loopscope does not know",
                table=table,
            )
        for table, names in columns.unknown_columns.items():
            text = (
                f"{table}: columns left out, which this loopscope does not know: {', '.join(sorted(names))}"
            )
            self._problem("schema", where, text, 0)
        for table, count in columns.misfits.items():
            self._problem(
                "journal", where, f"{count} row(s) of table {table!r} do not fit its schema", count, table
            )
        return rows


def read_table(path: str | Path, name: str, *, live: bool = True) -> pa.Table:
    """Rows of one table of the run at `path`; see `RunReader.read`."""
    return RunReader(path, tells=True).read(name, live=live)
