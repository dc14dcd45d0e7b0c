"""The header of a journal, and which journals this version does not read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from loopscope.store.journal.frames import FORMAT, Frame, scan
from loopscope.store.schema import TableSchema


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame: enough to read the rows when everything else is gone."""

    format: int = FORMAT
    run_id: str
    attempt: int
    parent_attempt: int | None
    first_step: int
    world_size: int
    writer: str
    seq: int
    schemas: dict[str, int]
    """Table → version of its schema."""
    loopscope_version: str


_decode = msgspec.msgpack.Decoder(JournalHeader).decode


def journal_header(data: bytes) -> JournalHeader | None:
    """What the first frame of a journal's content says; None where it is damaged."""
    first = next(scan(data), None)
    if isinstance(first, Frame) and first.ordinal == 0:
        with contextlib.suppress(msgspec.DecodeError):
            return _decode(first.payload)
    return None


def refusal(header: JournalHeader, tables: Mapping[str, TableSchema]) -> str:
    """Why this version does not read the rows of such a journal; empty where it does."""
    version = header.loopscope_version
    if header.format != FORMAT:
        later = " or a later one" if header.format > FORMAT else ""
        return (
            f"is a journal of format {header.format}, written by loopscope {version}; this version reads format "
            f"{FORMAT}. Read and seal it with that version{later}"
        )
    old = [name for name, known in tables.items() if header.schemas.get(name, known.version) < known.oldest]
    if old:
        said = ", ".join(
            f"{name} {header.schemas[name]} (read from {tables[name].oldest} on)" for name in old
        )
        return f"has older versions of tables, by loopscope {version}: {said}. Read and seal it with that version"
    return ""
