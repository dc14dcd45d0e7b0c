"""Sealing: a journal that nobody writes any more becomes one Parquet part per table, then goes away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loopscope.errors import SchemaError
from loopscope.store.disk import LOCAL_DISK, Disk
from loopscope.store.journal.columns import ArrowRows
from loopscope.store.journal.decode import (
    JournalHeader,
    decode_journal,
    journal_header,
    newer_format,
    read_journal,
)
from loopscope.store.names import JOURNAL_DIR, Segment, parse_journal, parse_part, table_dir
from loopscope.store.parts.ledger import Ledger, write_ledger
from loopscope.store.parts.parquet import PartMeta, file_crc, write_part
from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES

DAMAGED = ".damaged"
"""Added to the name of a journal that was sealed although some of it could not be read: it is kept."""


@dataclass
class Sealed:
    """What sealing one journal did."""

    journal: str
    parts: list[Path] = field(default_factory=list)
    rows: int = 0
    lost: int = 0
    faults: list[str] = field(default_factory=list)


def seal_journal(
    root: Path, name: str, *, disk: Disk = LOCAL_DISK, tables: Mapping[str, TableSchema] = TABLES
) -> Sealed:
    """Seal `journal/<name>`, which no process may be writing.

    May be stopped at any point and run again: parts that are already in place are kept, and the journal goes
    only after all of them.

    Raises:
        SchemaError: a newer loopscope wrote the journal; sealing it here would lose columns.
        OSError: the disk refused; the journal is still there.
    """
    path = root / JOURNAL_DIR / name
    segment = parse_journal(name)
    if segment is None:
        raise SchemaError(f"{path} is no journal; expected <attempt>-<writer>-<seq>.wal")
    data = read_journal(path)
    header = journal_header(data)
    result = Sealed(name)
    if header is None:
        content = decode_journal(path, data, tables, lambda table, row: None)
        if content.num_rows:
            # Without its header nothing says whose rows these are: leave them for the reader, which knows the run.
            raise SchemaError(
                f"{path.name}: the first record is damaged; it is read in place, and cannot be sealed"
            )
        # Its number was used: without a word of it, its absence would look like a loss.
        result.faults, result.lost = content.faults, content.lost
        write_ledger(disk, root, segment, Ledger(rows={}, crc32={}, lost=result.lost))
        _put_away(disk, path, result.lost)
        return result
    _check_versions(path, header, tables)
    rows = ArrowRows(tables, {"run_id": header.run_id, "attempt": header.attempt})
    content = decode_journal(path, data, tables, rows)
    del data
    chunks = rows.tables()
    result.faults = list(content.faults)
    result.lost = content.lost + sum(rows.misfits.values())
    crcs = _parts_in_place(root, segment, tables)
    counts = {table: sum(p.num_rows for p in parts) for table, parts in chunks.items() if parts}
    result.rows = sum(counts.values())
    for table in counts:
        if table not in crcs:
            meta = part_meta(header, tables[table], lost_rows=result.lost)
            path_of_part = write_part(disk, root, tables[table], meta, chunks[table])
            result.parts.append(path_of_part)
            crcs[table] = path_of_part.stem[-8:]
    write_ledger(disk, root, segment, Ledger(rows=counts, crc32=crcs, lost=result.lost))
    _put_away(disk, path, result.lost)
    return result


def _put_away(disk: Disk, path: Path, lost: int) -> None:
    if lost:
        disk.replace(path, path.with_name(path.name + DAMAGED))
    else:
        disk.unlink(path)
    with contextlib.suppress(OSError):
        disk.fsync_dir(path.parent)


def part_meta(header: JournalHeader, schema: TableSchema, *, lost_rows: int = 0) -> PartMeta:
    """What a part made of this journal says of itself."""
    return PartMeta(
        table=schema.name,
        schema_version=schema.version,
        run_id=header.run_id,
        attempt=header.attempt,
        writer=header.writer,
        seq=header.seq,
        parent_attempt=header.parent_attempt,
        first_step=header.first_step,
        world_size=header.world_size,
        loopscope_version=header.loopscope_version,
        lost_rows=lost_rows,
    )


def _check_versions(path: Path, header: JournalHeader, tables: Mapping[str, TableSchema]) -> None:
    if text := newer_format(header):
        raise SchemaError(f"{path.name} {text}.")
    newer = {t: v for t, v in header.schemas.items() if t not in tables or v > tables[t].version}
    if newer:
        raise SchemaError(
            f"{path.name} was written by loopscope {header.loopscope_version} with newer schemas {newer}; sealing it "
            "here would lose columns. Seal it with that version or a later one."
        )


def _parts_in_place(root: Path, segment: Segment, tables: Iterable[str]) -> dict[str, str]:
    """Table → CRC-32 in the name of this segment's part, where it already exists, whole."""
    found = {}
    for table in tables:
        folder = table_dir(root, table)
        if not folder.is_dir():
            continue
        for path in folder.glob(f"part-{segment.stem}-*.parquet"):
            parsed = parse_part(path.name)
            if parsed is not None and file_crc(path) == parsed[1]:
                found[table] = f"{parsed[1]:08x}"
    return found
