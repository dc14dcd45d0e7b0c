"""Verification of a sealed part: its bytes, its name, its metadata and its columns agree."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.parquet as pq

from loopscope.errors import SchemaError
from loopscope.store.parts.parquet import PartMeta, file_crc
from loopscope.store.read.files import SealedPart
from loopscope.store.schema import TableSchema


@dataclass(frozen=True, slots=True)
class VerifiedPart:
    """The metadata and the columns of a part that passed every check."""

    meta: PartMeta
    columns: frozenset[str]
    """Names of its columns, known to the registry or not."""


def verify_part(part: SealedPart, run_id: str, schema: TableSchema | None) -> VerifiedPart:
    """The part's metadata and columns, once its checksum, its name and its types were found to be right.

    Raises:
        SchemaError: its table's version is older than what this version of loopscope reads.
        ValueError: the part does not pass; the text says why.
        OSError: it cannot be read.
    """
    found = file_crc(part.path)
    if found != part.crc:
        raise ValueError(f"the CRC-32 of its content is {found:08x}, its name says {part.crc:08x}")
    arrow = pq.read_schema(part.path)
    meta = PartMeta.decode(arrow.metadata)
    said = (meta.table, meta.run_id, meta.attempt, meta.writer, meta.seq)
    named = (part.table, run_id, part.segment.attempt, part.segment.writer, part.segment.seq)
    if said != named:
        raise ValueError(
            f"its name and its metadata disagree: the metadata says {said}, expected {named} "
            "(table, run, attempt, writer, seq)"
        )
    if schema is not None and meta.schema_version < schema.oldest:
        raise SchemaError(
            f"holds table {part.table!r} at schema version {meta.schema_version}, written by loopscope "
            f"{meta.loopscope_version}; this version reads version {schema.oldest} and later. Read or compact the run "
            "with the version that wrote it"
        )
    if schema is not None and not arrow.equals(schema.arrow):
        for field in schema.arrow:
            index = arrow.get_field_index(field.name)
            if index >= 0 and arrow.field(index).type != field.type:
                got = arrow.field(index).type
                raise ValueError(f"its column {field.name!r} is {got}, expected {field.type}")
    return VerifiedPart(meta, frozenset(arrow.names))
