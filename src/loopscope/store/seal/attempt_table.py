"""`tables/attempt/attempts.parquet`: which sealed rows are live, for engines that know nothing of loopscope."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from loopscope.errors import StoreError
from loopscope.store.attempts import attempt_rows, live_ranges, merge_attempts, read_attempts
from loopscope.store.disk import LOCAL_DISK, Disk
from loopscope.store.manifest import read_manifest
from loopscope.store.names import ATTEMPT_PART, JOURNAL_DIR, table_dir
from loopscope.store.parts.parquet import PartMeta, rows_to_arrow, write_parquet
from loopscope.store.read.files import scan_parts, segments_by_attempt
from loopscope.store.tables import TABLES


def refresh_attempt_table(root: Path, *, disk: Disk = LOCAL_DISK) -> None:
    """Write the table anew from attempts/ and the sealed parts. Raises OSError or StoreError."""
    # Sealed rows only: an engine that reads Parquet sees no journal, and must not lose what a row there replaces.
    sealed = segments_by_attempt(scan_parts(root).parts)
    progress = {name for name, schema in TABLES.items() if schema.progress}
    table = _attempt_table(root, {n for n, tables in sealed.items() if tables & progress})
    folder = table_dir(root, "attempt")
    disk.mkdir(folder)
    temporary = root / JOURNAL_DIR / f"attempts.{os.getpid()}.{id(table):x}.tmp"
    write_parquet(disk, temporary, table.schema, [table])
    try:
        disk.replace(temporary, folder / ATTEMPT_PART)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    disk.fsync_dir(folder)


def empty_attempt_table(root: Path) -> bytes:
    """The file as it is while nothing is sealed: no attempt has a live row. Raises OSError or StoreError."""
    sink = io.BytesIO()
    pq.write_table(_attempt_table(root, ()), sink, write_page_checksum=True)
    return sink.getvalue()


def _attempt_table(root: Path, with_rows: Collection[int]) -> pa.Table:
    manifest = read_manifest(root)
    attempts = merge_attempts(read_attempts(root)[0], manifest.attempts)
    if not attempts:
        raise StoreError(f"{root} has no attempt yet")
    schema = TABLES["attempt"]
    ranges = live_ranges(attempts, with_rows)
    table = rows_to_arrow(schema, attempt_rows(manifest.run_id, attempts, ranges), {})
    meta = PartMeta(
        table="attempt",
        schema_version=schema.version,
        run_id=manifest.run_id,
        attempt=attempts[-1].attempt,
        writer="attempts",
        seq=0,
        parent_attempt=attempts[-1].parent_attempt,
        first_step=attempts[-1].first_step,
        world_size=attempts[-1].world_size,
        loopscope_version=manifest.loopscope_version,
    )
    return table.replace_schema_metadata(meta.encode())
