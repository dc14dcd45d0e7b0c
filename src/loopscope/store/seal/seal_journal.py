"""Sealing: a journal that no process writes any more becomes one Parquet part per table, and is removed."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopscope.errors import SchemaError, StoreError
from loopscope.store.checksum import encode_document
from loopscope.store.disk import LOCAL_DISK, Disk, write_file
from loopscope.store.journal.decode import JournalColumns, decode_journal
from loopscope.store.journal.file import read_journal
from loopscope.store.journal.frames import JournalHeader, journal_header
from loopscope.store.names import JOURNAL_DIR, Segment, parse_journal, parse_part, table_dir
from loopscope.store.parts.parquet import Ledger, PartMeta, file_crc, write_part
from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES

DAMAGED = ".damaged"
"""Added to the name of a journal that was sealed although some of it could not be read: it is kept."""
_COMMON = (
    "run_id", "attempt", "writer", "seq", "parent_attempt", "first_step", "world_size", "loopscope_version",
)  # fmt: skip
"""What a part and the header of its journal say alike."""


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

    May be stopped at any point and run again: parts that are already in place are kept, and the journal is removed
    after all of them.

    Raises:
        SchemaError: another loopscope wrote the journal, which this version does not read or would lose columns of.
        OSError: the disk refused; the journal is still there.
    """
    path = root / JOURNAL_DIR / name
    segment = parse_journal(name)
    if segment is None:
        raise SchemaError(f"{path} is no journal; expected <attempt>-<writer>-<seq>.wal")
    data = read_journal(path)
    header = journal_header(data)
    keys = {} if header is None else {"run_id": header.run_id, "attempt": header.attempt}
    columns = JournalColumns(tables, keys)
    content = decode_journal(name, data, tables, columns)
    if content.refused:
        raise SchemaError(f"{name} {content.refused}.")
    if header is None and content.num_rows:
        # Without its header nothing says whose rows these are: leave them for the reader, which knows the run.
        raise SchemaError(f"{name}: the first record is damaged; it is read in place, and cannot be sealed")
    del data
    chunks = {table: parts for table, parts in columns.tables().items() if parts}
    result = Sealed(name, faults=content.faults, lost=content.lost + sum(columns.misfits.values()))
    counts = {table: sum(p.num_rows for p in parts) for table, parts in chunks.items()}
    result.rows = sum(counts.values())
    crcs: dict[str, str] = {}
    if header is not None:
        _refuse_newer(name, header, tables)
        crcs = _parts_in_place(root, segment, tables)
        common: dict[str, Any] = {key: getattr(header, key) for key in _COMMON}
        for table in counts:
            if table in crcs:
                continue
            schema = tables[table]
            meta = PartMeta(table=table, schema_version=schema.version, lost_rows=result.lost, **common)
            result.parts.append(write_part(disk, root, schema, meta, chunks[table]))
            crcs[table] = result.parts[-1].stem[-8:]
    # Also where nothing is left of the journal: its number was used, and its absence would look like a loss.
    ledger = Ledger(rows=counts, crc32=crcs, lost=result.lost)
    write_file(disk, path.with_name(segment.ledger), encode_document(ledger))
    if result.lost:
        disk.replace(path, path.with_name(name + DAMAGED))
    else:
        disk.unlink(path)
    with contextlib.suppress(OSError):
        disk.fsync_dir(path.parent)
    return result


def try_to_seal(
    root: Path,
    name: str,
    failures: list[str],
    *,
    disk: Disk = LOCAL_DISK,
    tables: Mapping[str, TableSchema] = TABLES,
) -> Sealed | None:
    """The same, for a caller that goes on with the next journal: a failure is added to `failures` as text.

    None too where another process sealed it first.
    """
    try:
        return seal_journal(root, name, disk=disk, tables=tables)
    except FileNotFoundError:
        return None
    except (OSError, StoreError) as error:
        failures.append(f"{name}: {type(error).__name__}: {error}")
        return None


def _refuse_newer(name: str, header: JournalHeader, tables: Mapping[str, TableSchema]) -> None:
    newer = {t: v for t, v in header.schemas.items() if t not in tables or v > tables[t].version}
    if newer:
        raise SchemaError(
            f"{name} was written by loopscope {header.loopscope_version} with newer schemas {newer}; sealing it "
            "here would lose columns. Seal it with that version or a later one."
        )


def _parts_in_place(root: Path, segment: Segment, tables: Iterable[str]) -> dict[str, str]:
    """Table → CRC-32 in the name of this segment's part, where it already exists, whole."""
    found = {}
    for table in tables:
        for path in table_dir(root, table).glob(f"part-{segment.stem}-*.parquet"):
            parsed = parse_part(path.name)
            if parsed is not None and file_crc(path) == parsed[1]:
                found[table] = f"{parsed[1]:08x}"
    return found
