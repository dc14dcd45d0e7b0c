"""Sealed Parquet parts: their metadata, how they are encoded and written, and the ledger of what a journal became."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterable
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loopscope.store.disk import Disk, write_file
from loopscope.store.names import JOURNAL_DIR, Segment, table_dir
from loopscope.store.schema import TableSchema

_SAMPLE = 4096
_REPEATS = 0.5
"""A column whose distinct values are less than this share of its values repeats itself."""
_SAVES = 0.15
"""Compression that saves a smaller share is not worth its undoing."""
_CODEC = "zstd"


def parquet_options(schema: pa.Schema, first: pa.Table) -> dict[str, Any]:
    """Keyword arguments `use_dictionary` and `compression` for a Parquet writer.

    Args:
        schema: of the file.
        first: its first rows.
    """
    dictionary: list[str] = []
    compression: dict[str, str] = {}
    for field in schema:
        path = f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        repeats, saves = _judge(first[field.name].slice(0, _SAMPLE))
        if repeats:
            dictionary.append(path)
        compression[path] = _CODEC if repeats or saves else "none"
    return {"use_dictionary": dictionary, "compression": compression}


def _judge(column: pa.ChunkedArray) -> tuple[bool, bool]:
    """(values repeat, compression saves something). Anything but floats is taken to do both."""
    kind = column.type
    values = pc.list_flatten(column) if pa.types.is_list(kind) else column
    if not pa.types.is_floating(values.type):
        return True, True
    values = values.drop_null().slice(0, _SAMPLE).combine_chunks()
    if not len(values) or pc.count_distinct(values).as_py() < _REPEATS * len(values):
        return True, True
    raw = values.to_numpy(zero_copy_only=False).tobytes()
    return False, len(pa.Codec(_CODEC).compress(raw)) < (1 - _SAVES) * len(raw)


ROW_GROUP_BYTES = 32 << 20
"""Arrow bytes per row group; under 64 MB in the file even where nothing compresses."""
_PREFIX = b"loopscope."


class PartMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a part's file metadata holds."""

    table: str
    schema_version: int
    run_id: str
    attempt: int
    writer: str
    loopscope_version: str
    seq: int = 0
    parent_attempt: int | None = None
    first_step: int = 0
    world_size: int = 0
    lost_rows: int = 0
    """Rows of the journal that could not be read when it was sealed."""

    def encode(self) -> dict[bytes, bytes]:
        """As Parquet key-value metadata."""
        return {
            _PREFIX + name.encode(): str(value).encode()
            for name, value in msgspec.structs.asdict(self).items()
            if value is not None
        }

    @classmethod
    def decode(cls, metadata: dict[bytes, bytes] | None) -> PartMeta:
        """From Parquet key-value metadata; ValueError where it is not one of ours."""
        found = {
            k.removeprefix(_PREFIX).decode(): v.decode()
            for k, v in (metadata or {}).items()
            if k.startswith(_PREFIX) and v  # An empty value is none, as earlier versions wrote it.
        }
        try:
            return msgspec.convert(found, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"its metadata is not that of a part: {error}") from None


def parquet_bytes(schema: pa.Schema, tables: Iterable[pa.Table]) -> memoryview:
    """The content of a Parquet file. Made in memory, so that an error of the library leaves no file behind.

    Args:
        schema: of the file, with its metadata.
        tables: its rows in order.
    """
    rest = iter(tables)
    first = next(rest, schema.empty_table())
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, write_page_checksum=True, **parquet_options(schema, first)) as writer:
        for table in chain([first], rest):
            for group in _row_groups(table):
                writer.write_table(group, row_group_size=max(1, group.num_rows))
    return memoryview(sink.getvalue())


def _row_groups(table: pa.Table) -> Iterable[pa.Table]:
    rows = max(1, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes))
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)


def write_part(
    disk: Disk, root: Path, schema: TableSchema, meta: PartMeta, tables: Iterable[pa.Table]
) -> Path:
    """Put one sealed part in place: temporary name, fsync, rename, fsync of the folder. Raises OSError."""
    segment = Segment(meta.attempt, meta.writer, meta.seq)
    folder = table_dir(root, schema.name)
    disk.mkdir(folder.parent)
    disk.mkdir(folder)
    data = parquet_bytes(schema.arrow.with_metadata(meta.encode()), tables)
    path = folder / segment.part(zlib.crc32(data))
    write_file(disk, path, data, temporary_for(root, f"{segment.stem}.{schema.name}"))
    return path


def conform(table: pa.Table, target: pa.Schema) -> pa.Table:
    """The table with exactly the target's columns: what is missing is null, what is extra is left out.

    Raises:
        ValueError: a column's type is not the target's.
    """
    there = set(table.column_names)
    arrays = [table[f.name] if f.name in there else pa.nulls(table.num_rows, f.type) for f in target]
    for field, array in zip(target, arrays, strict=True):
        if array.type != field.type:
            raise ValueError(f"column {field.name!r} is {array.type}, expected {field.type}")
    return pa.Table.from_arrays(arrays, schema=target)


def temporary_for(root: Path, name: str) -> Path:
    """Where a file of a table is written before it is renamed into the table's folder.

    With the journals: a side file in a table's folder would break other engines' scans. The name is this writer's own:
    two that seal one journal, such as `loopscope seal` beside the training, must not write into, or rename, one
    another's half-written file.
    """
    return root / JOURNAL_DIR / f"{name}.{secrets.token_hex(4)}.tmp"


def arrow_source(path: Path) -> Path | BytesIO:
    """What Arrow opens a file by: its path, or its bytes where the path is no valid text, which Arrow refuses."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return BytesIO(path.read_bytes())
    return path


def file_crc(path: Path) -> int:
    """CRC-32 of a file's content."""
    # One small buffer, used again: the bytes are summed while they are still in the processor's cache.
    crc, buffer = 0, memoryview(bytearray(1 << 18))
    with path.open("rb", buffering=0) as file:
        while taken := file.readinto(buffer):
            crc = zlib.crc32(buffer[:taken], crc)
    return crc


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one segment."""

    rows: dict[str, int]
    """Table → rows."""
    crc32: dict[str, str]
    """Table → CRC-32 of its part, as in the part's name."""
    lost: int = 0
    """Rows of the journal that could not be read."""
