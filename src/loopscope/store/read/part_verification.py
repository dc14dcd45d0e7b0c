"""Whether a sealed part can be believed: its bytes, its name and its own word agree."""

from __future__ import annotations

import pyarrow.parquet as pq

from loopscope.store.parts.parquet import PartMeta, file_crc
from loopscope.store.read.files import SealedPart
from loopscope.store.schema import TableSchema


def check_part(part: SealedPart, run_id: str, schema: TableSchema | None) -> tuple[PartMeta, tuple[str, ...]]:
    """What the part says of itself and the names of its columns, once it was found to be true.

    Raises:
        ValueError: it cannot be believed; the text says why.
        OSError: it cannot be read.
    """
    found = file_crc(part.path)
    if found != part.crc:
        raise ValueError(f"its content has CRC-32 {found:08x}, its name says {part.crc:08x}")
    arrow = pq.read_schema(part.path)
    meta = PartMeta.decode(arrow.metadata)
    said = (meta.table, meta.run_id, meta.attempt, meta.writer, meta.seq)
    named = (part.table, run_id, part.segment.attempt, part.segment.writer, part.segment.seq)
    if said != named:
        raise ValueError(
            f"its name lies: it says {said} of itself, expected {named} (table, run, attempt, writer, seq)"
        )
    if schema is not None and not arrow.equals(schema.arrow):
        for field in schema.arrow:
            index = arrow.get_field_index(field.name)
            if index >= 0 and arrow.field(index).type != field.type:
                got = arrow.field(index).type
                raise ValueError(f"its column {field.name!r} is {got}, expected {field.type}")
    return meta, tuple(arrow.names)
