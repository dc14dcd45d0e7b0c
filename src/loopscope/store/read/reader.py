"""Reading a run while it is written, after a crash, after rollbacks: sealed parts and what the journals hold."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loopscope.errors import NotARunError, SchemaError, StoreError
from loopscope.store.attempts import (
    LiveRange,
    attempt_rows,
    chain_faults,
    live_ranges,
    merge_attempts,
    read_attempts,
)
from loopscope.store.journal.columns import ArrowRows
from loopscope.store.journal.decode import decode_journal, holds_row_of, journal_header
from loopscope.store.manifest import LAYOUT, Attempt, Manifest, read_manifest
from loopscope.store.names import JOURNAL_DIR, MANIFEST, TABLES_DIR, Segment
from loopscope.store.parts.parquet import PartMeta, rows_to_arrow
from loopscope.store.read.files import Problem, RunFiles, SealedPart, scan_files, segments_by_attempt
from loopscope.store.read.part_verification import check_part
from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES


class RunReader:
    """One look at a run: what was there when it was opened. Nothing is written, nothing is locked."""

    def __init__(self, path: str | Path, *, tables: Mapping[str, TableSchema] = TABLES) -> None:
        """Open a run directory.

        Raises:
            NotARunError: the folder holds no run.
        """
        self.root = Path(path)
        self.schemas = tables
        try:
            is_folder = self.root.is_dir()
        except OSError as error:  # a name that is too long, a folder on the way that may not be entered
            raise NotARunError(f"{self.root} is not a run: {error.strerror or error}.") from None
        if not is_folder:
            raise NotARunError(f"{self.root} is not a run: there is no such folder.")
        self.files: RunFiles = scan_files(self.root)
        self.problems: list[Problem] = list(self.files.problems)
        """What is wrong with the run, as far as was looked: a table's own parts are checked when it is read."""
        self._checked: dict[Path, PartMeta | None] = {}
        self._looked_for_missing = False
        self._told: set[Segment] = set()
        """Journals that are known to have been sealed damaged."""
        self._columns: dict[Path, frozenset[str]] = {}
        """Part that was checked → its columns, known to the registry or not."""
        self._journal_rows: dict[Segment, dict[str, list[pa.Table]]] = {}
        self.manifest = self._manifest()
        self.attempts = self._attempts()
        progress = {name for name, schema in tables.items() if schema.progress}
        with_rows = {n for n, found in segments_by_attempt(self.files.parts).items() if found & progress}
        for segment, data in self.files.journals.items():
            if segment.attempt not in with_rows and holds_row_of(data, progress):
                with_rows.add(segment.attempt)
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
        """
        schema = self.schema(table)
        wanted = list(schema.names if columns is None else columns)
        pieces = list(self.iterate(table, live=live, columns=wanted))
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
            yield rows_to_arrow(schema, rows, {}).select(wanted)
            return
        needed = wanted if not live or "step" in wanted else [*wanted, "step"]
        target = pa.schema([schema.arrow.field(c) for c in needed])
        for part in self.parts(table, live=live):
            piece = self._read_part(part, target)
            if piece is not None:
                piece = self.only_live(piece, part.segment.attempt) if live else piece
                yield piece.select(wanted)
        for attempt, chunk in self.journal_rows(table, live=live):
            piece = chunk.select(needed)
            piece = self.only_live(piece, attempt) if live else piece
            yield piece.select(wanted)

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
        """The sealed parts of a table that can be believed; the others become problems.

        With `live`, parts of attempts without a live row are left out.
        """
        wanted = [p for p in self.files.parts.get(table, ()) if not live or p.segment.attempt in self.live]
        if len(wanted) > 1:
            # Checksums take their time, and let other threads run meanwhile.
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                return [p for p, meta in zip(wanted, pool.map(self._believed, wanted), strict=True) if meta]
        return [p for p in wanted if self._believed(p) is not None]

    def columns_of(self, part: SealedPart) -> tuple[str, ...]:
        """The registry's columns that a part has; none where it cannot be believed."""
        if self._believed(part) is None:
            return ()
        there = self._columns[part.path]
        return tuple(c for c in self.schema(part.table).names if c in there)

    def journal_rows(self, table: str, *, live: bool = True) -> list[tuple[int, pa.Table]]:
        """(attempt, rows) of what is not sealed yet; a segment whose part is there and whole is left out."""
        sealed = {p.segment for p in self.files.parts.get(table, ()) if self._believed(p) is not None}
        found = []
        for segment in sorted(self.files.journals):
            if segment in sealed or (live and segment.attempt not in self.live):
                continue
            found += [(segment.attempt, chunk) for chunk in self._rows_of(segment).get(table, ())]
        return found

    def check_all(self) -> list[Problem]:
        """Look at every file, and return all problems."""
        for table in self.files.parts:
            for part in self.files.parts[table]:
                self._believed(part)
        for segment in self.files.journals:
            self._rows_of(segment)
        if not self._looked_for_missing:
            self._missing_parts()
            self._looked_for_missing = True
        return self.problems

    def only_live(self, piece: pa.Table, attempt: int) -> pa.Table:
        """Those rows of one attempt that are live; the table needs its `step` column."""
        live = self.live[attempt]
        keep = pc.greater_equal(piece["step"], live.start)
        if live.end is not None:
            keep = pc.and_(keep, pc.less(piece["step"], live.end))
        return piece.filter(keep)

    def _believed(self, part: SealedPart) -> PartMeta | None:
        if part.path not in self._checked:
            where = f"{TABLES_DIR}/{part.table}/{part.path.name}"
            try:
                meta, names = check_part(part, self.manifest.run_id, self.schemas.get(part.table))
            except (OSError, ValueError, pa.ArrowException) as error:
                self._distrust(part, where, str(error))
                return None
            self._checked[part.path], self._columns[part.path] = meta, frozenset(names)
            schema = self.schemas.get(part.table)
            if schema is not None and meta.schema_version > schema.version:
                extra = sorted(set(names) - schema.name_set)
                text = (
                    f"has schema version {meta.schema_version}, this loopscope knows {schema.version}; columns "
                    f"left out: {', '.join(extra) or 'none'}"
                )
                self.problems.append(Problem("schema", where, text, 0))
            self._lost_in_sealing(part.segment, meta.lost_rows)
        return self._checked[part.path]

    def _lost_in_sealing(self, segment: Segment, rows: int) -> None:
        """Once per journal, of which every part says it; a journal that is still there speaks for itself."""
        if rows and segment not in self._told and segment not in self.files.journals:
            self._told.add(segment)
            text = "was damaged when it was sealed"
            self.problems.append(Problem("journal", f"{JOURNAL_DIR}/{segment.journal}", text, rows))

    def _distrust(self, part: SealedPart, where: str, reason: str) -> None:
        self._checked[part.path] = None
        if part.segment in self.files.journals:
            self.problems.append(Problem("part", where, f"{reason}; its journal is read instead", 0))
            return
        ledger = self.files.ledgers.get(part.segment)
        lost = None if ledger is None else ledger.rows.get(part.table)
        self.problems.append(Problem("part", where, f"{reason}; its rows are left out", lost))

    def _missing_parts(self) -> None:
        """Parts that a ledger names and that are not there."""
        there = {(p.table, p.segment) for parts in self.files.parts.values() for p in parts}
        for segment, ledger in sorted(self.files.ledgers.items()):
            if segment in self.files.journals:
                continue
            for table, count in ledger.rows.items():
                if (table, segment) not in there:
                    where = f"{TABLES_DIR}/{table}/part-{segment.stem}-{ledger.crc32.get(table, '')}.parquet"
                    self.problems.append(Problem("part", where, "is not there any more", count))

    def _read_part(self, part: SealedPart, target: pa.Schema) -> pa.Table | None:
        try:
            with pq.ParquetFile(part.path, page_checksum_verification=True) as file:
                names = set(file.schema_arrow.names)
                table = file.read(columns=[c for c in target.names if c in names])
            return conform(table, target)
        except (OSError, ValueError, pa.ArrowException) as error:
            where = f"{TABLES_DIR}/{part.table}/{part.path.name}"
            self._distrust(part, where, f"cannot be read ({error})")
            return None

    def _rows_of(self, segment: Segment) -> dict[str, list[pa.Table]]:
        if segment not in self._journal_rows:
            data = self.files.journals[segment]
            keys = {"run_id": self.manifest.run_id, "attempt": segment.attempt}
            rows = ArrowRows(self.schemas, keys)
            path = self.root / JOURNAL_DIR / segment.journal
            content = decode_journal(path, data, self.schemas, rows)
            where = f"{JOURNAL_DIR}/{segment.journal}"
            header = content.header
            if header is not None and (header.run_id, header.attempt, header.writer) != (
                self.manifest.run_id,
                segment.attempt,
                segment.writer,
            ):
                text = (
                    f"its name lies: it holds run {header.run_id}, attempt {header.attempt}, writer "
                    f"{header.writer}; its rows are left out"
                )
                self.problems.append(Problem("journal", where, text))
                self._journal_rows[segment] = {}
                return {}
            if content.newer:
                self.problems.append(Problem("schema", where, f"{content.newer}; its rows are left out"))
            if content.faults or content.lost:
                text = "; ".join(content.faults)
                self.problems.append(Problem("journal", where, text, content.lost))
            self._journal_rows[segment] = rows.tables()
            for table, count in rows.unknown_tables.items():
                text = f"holds {count} row(s) of table {table!r}, which this loopscope does not know"
                self.problems.append(Problem("schema", where, text))
            for table, names in rows.unknown_columns.items():
                text = f"{table}: columns left out, which this loopscope does not know: {', '.join(sorted(names))}"
                self.problems.append(Problem("schema", where, text, 0))
            for table, count in rows.misfits.items():
                text = f"{count} row(s) of table {table!r} do not fit its schema"
                self.problems.append(Problem("journal", where, text, count))
        return self._journal_rows[segment]

    def _manifest(self) -> Manifest:
        try:
            manifest = read_manifest(self.root)
        except StoreError as error:
            rebuilt = self._rebuilt()
            if rebuilt is None:
                if isinstance(error, NotARunError):
                    raise
                raise NotARunError(f"{error}; and no row was found to rebuild it from") from None
            text = f"missing or invalid ({error}); identity and attempts were rebuilt from the rows"
            self.problems.append(Problem("manifest", MANIFEST, text))
            return rebuilt
        if manifest.format > LAYOUT:
            text = (
                f"has layout {manifest.format}, written by loopscope {manifest.loopscope_version}; this version knows "
                f"layout {LAYOUT}: what it reads is right as far as it goes, and may not be all"
            )
            self.problems.append(Problem("schema", MANIFEST, text, 0))
        return manifest

    def _rebuilt(self) -> Manifest | None:
        """Identity and attempts from parts and journals alone."""
        seen: dict[int, Attempt] = {}
        runs: dict[str, int] = {}
        sources: list[Any] = []
        for parts in self.files.parts.values():
            for part in parts:
                try:
                    sources.append(PartMeta.decode(pq.read_schema(part.path).metadata))
                except (OSError, ValueError, pa.ArrowException):
                    continue
        sources += [h for d in self.files.journals.values() if (h := journal_header(d)) is not None]
        for source in sources:
            runs[source.run_id] = runs.get(source.run_id, 0) + 1
            seen[source.attempt] = Attempt(
                attempt=source.attempt,
                parent_attempt=source.parent_attempt,
                first_step=source.first_step,
                world_size=source.world_size,
                loopscope_version=source.loopscope_version,
            )
        if not runs:
            return None
        run_id = max(runs, key=lambda r: runs[r])
        created = datetime.fromtimestamp(int(run_id.replace("-", "")[:12], 16) / 1000, UTC)
        attempts = [seen[n] for n in sorted(seen)]
        return Manifest(
            run_id=run_id, run_name=self.root.name, created=created, attempts=attempts, rebuilt=True
        )

    def _attempts(self) -> list[Attempt]:
        found, faults = read_attempts(self.root)
        attempts = merge_attempts(found, self.manifest.attempts)
        self.problems += [
            Problem("attempt", "attempts", fault) for fault in [*faults, *chain_faults(attempts)]
        ]
        named = {a.attempt for a in attempts}
        there = {p.segment.attempt for parts in self.files.parts.values() for p in parts}
        for number in sorted((there | {s.attempt for s in self.files.journals}) - named):
            text = f"attempt {number} has rows but is recorded nowhere; its rows are not live"
            self.problems.append(Problem("attempt", "attempts", text))
        for segment, ledger in sorted(self.files.ledgers.items()):
            self._lost_in_sealing(segment, ledger.lost)
        for name in self.files.damaged:
            text = "was sealed although some of it could not be read; kept for inspection"
            self.problems.append(Problem("journal", f"{JOURNAL_DIR}/{name}", text, 0))
        return attempts


def conform(table: pa.Table, target: pa.Schema) -> pa.Table:
    """The table with exactly the target's columns: what is missing is null, what is extra is left out.

    Raises:
        ValueError: a column's type is not the target's.
    """
    arrays = []
    there = set(table.column_names)
    for field in target:
        if field.name not in there:
            arrays.append(pa.nulls(table.num_rows, field.type))
            continue
        column = table[field.name]
        if column.type != field.type:
            raise ValueError(f"column {field.name!r} is {column.type}, expected {field.type}")
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=target)


def read_table(path: str | Path, name: str, *, live: bool = True) -> pa.Table:
    """Rows of one table of the run at `path`; see `RunReader.read`."""
    return RunReader(path).read(name, live=live)
