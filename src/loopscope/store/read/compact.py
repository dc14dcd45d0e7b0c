"""Compaction: the live rows of a run as a dataset of few, large Parquet files that any engine reads as it is."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from loopscope.errors import ConfigError, StoreError
from loopscope.store.disk import LOCAL_DISK, create_file, writing_into
from loopscope.store.parts.parquet import PartMeta, parquet_bytes
from loopscope.store.read.files import Problem
from loopscope.store.read.reader import RunReader
from loopscope.store.schema import TableSchema
from loopscope.store.tables import TABLES

FILE_BYTES = 256 << 20
"""Arrow bytes per file; the file itself is several times smaller."""
COMPACT_DIR = "compact"
_MARKER = "_loopscope_compact"


@dataclass
class Compacted:
    """What compaction wrote."""

    path: Path
    files: dict[str, list[Path]] = field(default_factory=dict)
    """Table → its files."""
    rows: dict[str, int] = field(default_factory=dict)
    """Table → live rows."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with the run: rows that could not be read are not in the dataset."""


def compact_run(
    root: Path,
    out: Path | None = None,
    *,
    file_bytes: int = FILE_BYTES,
    tables: Mapping[str, TableSchema] = TABLES,
) -> Compacted:
    """Write the live rows of every table to `out`/<table>/; the run itself is left as it is.

    The folder appears whole, by rename; an older compaction of this run in its place is replaced.

    Args:
        root: the run.
        out: RUN/compact where None.
        file_bytes: Arrow bytes per file.
        tables: the schema registry.

    Raises:
        NotARunError: the folder holds no run.
        StoreError: `out` holds something else than a compaction.
        ConfigError: `out` is a file, or cannot be written.
    """
    reader = RunReader(root, tables=tables)
    target = out if out is not None else root / COMPACT_DIR
    _refuse_other(target)
    result = Compacted(target)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with writing_into(target):
            for table in reader.tables:
                _compact_table(reader, table, temporary / table, result, file_bytes)
            temporary.mkdir(parents=True, exist_ok=True)
            (temporary / _MARKER).write_text(reader.manifest.run_id + "\n")
            old = target.with_name(f"{target.name}.{os.getpid()}.old.tmp")
            if target.exists():
                target.replace(old)
            temporary.replace(target)
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    result.problems = reader.problems
    return result


def _refuse_other(target: Path) -> None:
    with writing_into(target):
        if target.exists() and not target.is_dir():
            raise ConfigError(
                f"{target} is a file, expected a folder that does not exist, is empty or is a compaction"
            )
        if target.exists() and not (target / _MARKER).exists() and any(target.iterdir()):
            raise StoreError(f"{target} holds something else than a compaction. Choose another folder.")


def _compact_table(reader: RunReader, table: str, folder: Path, result: Compacted, file_bytes: int) -> None:
    folder.mkdir(parents=True)
    schema = reader.schema(table)
    meta = PartMeta(
        table=table,
        schema_version=schema.version,
        run_id=reader.manifest.run_id,
        attempt=0,
        writer="compact",
        loopscope_version=reader.manifest.loopscope_version,
    )
    arrow = schema.arrow.with_metadata(meta.encode())
    result.files[table], result.rows[table] = [], 0
    for number, tables in enumerate(_batches(reader, table, file_bytes)):
        name, rows = f"live-{number:05d}.parquet", pa.concat_tables(tables).combine_chunks()
        create_file(LOCAL_DISK, folder / name, parquet_bytes(arrow, [rows]))
        result.files[table].append(result.path / table / name)
        result.rows[table] += rows.num_rows


def _batches(reader: RunReader, table: str, file_bytes: int) -> Iterator[list[pa.Table]]:
    """Live rows, as many at a time as go into one file."""
    pending: list[pa.Table] = []
    size = 0
    for piece in (piece for piece in reader.iterate(table) if piece.num_rows):
        pending.append(piece)
        size += piece.nbytes
        if size >= file_bytes:
            yield pending
            pending, size = [], 0
    if pending:
        yield pending


def adopt_into_delta(compacted: Compacted) -> dict[str, int]:
    """Make each compacted table a Delta table, in place and without a JVM. Table → Delta version.

    Raises:
        StoreError: deltalake is not installed.
    """
    try:
        from deltalake import DeltaTable, convert_to_deltalake
    except ImportError:
        raise StoreError("deltalake is not installed; `pip install deltalake`") from None
    versions = {}
    for table in (table for table, files in compacted.files.items() if files):
        path = compacted.path / table
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path / "_delta_log")
        convert_to_deltalake(str(path))
        versions[table] = DeltaTable(str(path)).version()
    return versions
