"""Sealed Parquet parts: how they are written, and how they are believed."""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from loopscope.store.disk import Disk, write_all
from loopscope.store.names import JOURNAL_DIR, Segment, table_dir
from loopscope.store.parts.encodings import parquet_options
from loopscope.store.schema import TableSchema

ROW_GROUP_BYTES = 32 << 20
"""Arrow bytes per row group; under 64 MB in the file even where nothing compresses."""

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PartMeta:
    """What a part says of itself in its file metadata."""

    table: str
    schema_version: int
    run_id: str
    attempt: int
    writer: str
    seq: int
    parent_attempt: int | None
    first_step: int
    world_size: int
    loopscope_version: str
    lost_rows: int = 0
    """Rows of the journal that could not be read when it was sealed."""

    def encode(self) -> dict[bytes, bytes]:
        """As Parquet key-value metadata."""
        return {
            f"loopscope.{name}".encode(): ("" if value is None else str(value)).encode()
            for name, value in vars(self).items()
        }

    @classmethod
    def decode(cls, metadata: dict[bytes, bytes] | None) -> PartMeta:
        """From Parquet key-value metadata; ValueError where it is not one of ours."""
        text = {
            k.decode()[10:]: v.decode() for k, v in (metadata or {}).items() if k.startswith(b"loopscope.")
        }
        try:
            parent = text["parent_attempt"]
            return cls(
                table=text["table"],
                schema_version=int(text["schema_version"]),
                run_id=text["run_id"],
                attempt=int(text["attempt"]),
                writer=text["writer"],
                seq=int(text["seq"]),
                parent_attempt=int(parent) if parent else None,
                first_step=int(text["first_step"]),
                world_size=int(text["world_size"]),
                loopscope_version=text["loopscope_version"],
                lost_rows=int(text.get("lost_rows", "0")),
            )
        except KeyError as error:
            raise ValueError(f"its metadata lacks {error.args[0]!r}") from None


class _Sink:
    """A file for pyarrow that goes through `Disk` and sums its own CRC-32 as it grows."""

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk = disk
        self._fd = fd
        self._size = 0
        self._buffer = bytearray()
        self.crc = 0
        self.closed = False

    def write(self, data: Any) -> int:
        before = len(self._buffer)
        self._buffer += data
        taken = len(self._buffer) - before
        self._size += taken
        if len(self._buffer) >= _BUFFER_BYTES:
            self.drain()
        return taken

    def drain(self) -> None:
        content, self._buffer = bytes(self._buffer), bytearray()
        write_all(self._disk, self._fd, content)
        self.crc = zlib.crc32(content, self.crc)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def rows_to_arrow(schema: TableSchema, rows: Sequence[dict[str, Any]], keys: dict[str, Any]) -> pa.Table:
    """Rows as an Arrow table of the registry's schema.

    `keys` holds the values that every row shares and that rows leave out. Columns that this version does not
    know are left out.
    """
    there: set[str] = set().union(*rows)
    columns = []
    for field in schema.arrow:
        default = keys.get(field.name)
        if field.name in there:
            columns.append(pa.array([row.get(field.name, default) for row in rows], type=field.type))
        else:
            # Most columns of most rows: nobody looks for them in every row.
            columns.append(pa.repeat(pa.scalar(default, field.type), len(rows)))
    return pa.Table.from_arrays(columns, schema=schema.arrow)


def write_parquet(disk: Disk, path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> int:
    """Write a whole Parquet file, fsync it, and return its CRC-32. Removes the file when that fails."""
    fd = disk.create(path)
    try:
        sink = _Sink(disk, fd)
        try:
            rest = iter(tables)
            first = next(rest, None)
            options = parquet_options(schema, schema.empty_table() if first is None else first)
            with pq.ParquetWriter(
                pa.PythonFile(sink, mode="w"), schema, write_page_checksum=True, **options
            ) as writer:
                for table in chain([] if first is None else [first], rest):
                    for group in _row_groups(table):
                        writer.write_table(group, row_group_size=max(1, group.num_rows))
            sink.drain()
            disk.fsync(fd)
        finally:
            disk.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(path)
        raise
    return sink.crc


def _row_groups(table: pa.Table) -> Iterable[pa.Table]:
    rows = max(1, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes))
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)


def write_part(
    disk: Disk, root: Path, schema: TableSchema, meta: PartMeta, tables: Iterable[pa.Table]
) -> Path:
    """Put one sealed part in place: temporary name, fsync, rename, fsync of the folder."""
    segment = Segment(meta.attempt, meta.writer, meta.seq)
    folder = table_dir(root, schema.name)
    disk.mkdir(folder)
    # The temporary lies with the journals: a side file in a table's folder would break other engines' scans.
    # It is this sealer's own: two that seal one journal, such as `loopscope seal` beside the training, must not write
    # into, or rename, one another's half-written file.
    temporary = root / JOURNAL_DIR / f"{segment.stem}.{schema.name}.{secrets.token_hex(4)}.tmp"
    crc = write_parquet(disk, temporary, schema.arrow.with_metadata(meta.encode()), tables)
    path = folder / segment.part(crc)
    try:
        disk.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    disk.fsync_dir(folder)
    return path


def file_crc(path: Path) -> int:
    """CRC-32 of a file's content."""
    # One small buffer, used again: the bytes are summed while they are still in the processor's cache.
    crc, buffer = 0, memoryview(bytearray(1 << 18))
    with path.open("rb", buffering=0) as file:
        while taken := file.readinto(buffer):
            crc = zlib.crc32(buffer[:taken], crc)
    return crc
