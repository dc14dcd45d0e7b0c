"""`tables/attempt/attempts.parquet`: which sealed rows are live, for engines that know nothing of loopscope."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa

from loopscope.errors import StoreError
from loopscope.store.attempts import attempt_rows, live_ranges, merge_attempts, read_attempts
from loopscope.store.disk import LOCAL_DISK, Disk, write_file
from loopscope.store.manifest import read_manifest
from loopscope.store.names import ATTEMPT_PART, table_dir
from loopscope.store.parts.parquet import PartMeta, parquet_bytes, temporary_for
from loopscope.store.read.files import attempts_that_count, scan_files
from loopscope.store.tables import TABLES


def refresh_attempt_table(root: Path, *, disk: Disk = LOCAL_DISK) -> None:
    """Rewrite the table from attempts/ and the sealed parts. Raises OSError or StoreError."""
    # Sealed rows only: an engine that reads Parquet sees no journal, and must not lose what a row there replaces.
    data = attempt_table(root, attempts_that_count(scan_files(root, journals=False).parts, TABLES))
    folder = table_dir(root, "attempt")
    disk.mkdir(folder.parent)
    disk.mkdir(folder)
    write_file(disk, folder / ATTEMPT_PART, data, temporary_for(root, "attempts"))


def attempt_table(root: Path, with_rows: Collection[int] = ()) -> memoryview:
    """The content of the file. Raises OSError or StoreError.

    Args:
        root: the run directory.
        with_rows: attempts that have a sealed row; with none of them no attempt has a live row.
    """
    manifest = read_manifest(root)
    attempts = merge_attempts(read_attempts(root)[0], manifest.attempts)
    if not attempts:
        raise StoreError(f"{root} has no attempt yet")
    schema, newest = TABLES["attempt"], attempts[-1]
    meta = PartMeta(
        table="attempt",
        schema_version=schema.version,
        run_id=manifest.run_id,
        attempt=newest.attempt,
        writer="attempts",
        parent_attempt=newest.parent_attempt,
        first_step=newest.first_step,
        world_size=newest.world_size,
        loopscope_version=manifest.loopscope_version,
    )
    rows = attempt_rows(manifest.run_id, attempts, live_ranges(attempts, with_rows))
    arrow = schema.arrow.with_metadata(meta.encode())
    return parquet_bytes(arrow, [pa.Table.from_pylist(rows, schema=arrow)])
