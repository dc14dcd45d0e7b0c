"""Frames: the unit of the journal. Marker, ordinal, length, CRC-32, payload. The first one is the journal's header.

A torn or flipped frame costs itself alone: the marker finds the next one, and the ordinals tell how many are
missing between two good ones. The header looks alike in every format; the checksums of all other frames begin with the
format's number, so that a journal of another format holds no good row, even where its header is lost.
"""

import contextlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from loopscope.store.schema import TableSchema

FORMAT = 3
"""The format of a journal that this version writes and reads; 1 and 2 are refused by name."""

MARKER = b"\xf5LSF"
_HEAD = struct.Struct("<4sIII")
_COUNTED = struct.Struct("<II")
HEAD_SIZE = _HEAD.size
MAX_PAYLOAD = 1 << 26
"""64 MiB; a row beyond it is refused."""


class Frame(NamedTuple):
    """A frame whose checksum matches."""

    ordinal: int
    payload: bytes
    end: int
    """Offset just behind it."""


class Gap(NamedTuple):
    """Bytes without a frame whose checksum matches."""

    start: int
    end: int
    torn: bool
    """True where the file just ends inside a frame, as after a crash in the middle of a write."""


def encode_frame(ordinal: int, payload: bytes) -> bytes:
    """The bytes of one frame. OSError where it is too long to be read again."""
    length = len(payload)
    if length > MAX_PAYLOAD:
        raise OSError(f"a record has {length} bytes, expected at most {MAX_PAYLOAD}")
    # As `_checksum` has it, without a call: this runs for every row in the training thread.
    crc = zlib.crc32(payload, zlib.crc32(_COUNTED.pack(ordinal, length), FORMAT if ordinal else 0))
    return _HEAD.pack(MARKER, ordinal, length, crc) + payload


def encode_frames(first: int, payloads: Iterable[bytes]) -> bytes:
    """The same as `encode_frame` for each, with ordinals from `first` on, without a call and a copy per frame."""
    pieces: list[bytes] = []
    add, head, counted, crc32 = pieces.append, _HEAD.pack, _COUNTED.pack, zlib.crc32
    for ordinal, payload in enumerate(payloads, first):
        if (length := len(payload)) > MAX_PAYLOAD:
            raise OSError(f"a record has {length} bytes, expected at most {MAX_PAYLOAD}")
        seed = crc32(counted(ordinal, length), FORMAT if ordinal else 0)
        add(head(MARKER, ordinal, length, crc32(payload, seed)))
        add(payload)
    return b"".join(pieces)


def scan(data: bytes) -> Iterator[Frame | Gap]:
    """The frames and gaps of a file's content, in order."""
    position, size = 0, len(data)
    while position < size:
        frame = _frame_at(data, position)
        if frame is not None:
            yield frame
            position = frame.end
            continue
        following = _next_frame(data, position + 1)
        end = size if following is None else following
        yield Gap(position, end, torn=following is None and _is_torn(data, position))
        position = end


def _frame_at(data: bytes, position: int) -> Frame | None:
    if len(data) - position < HEAD_SIZE:
        return None
    marker, ordinal, length, crc = _HEAD.unpack_from(data, position)
    start = position + HEAD_SIZE
    if marker != MARKER or length > MAX_PAYLOAD or start + length > len(data):
        return None
    payload = data[start : start + length]
    return Frame(ordinal, payload, start + length) if _checksum(ordinal, payload) == crc else None


def _checksum(ordinal: int, payload: bytes) -> int:
    counted = _COUNTED.pack(ordinal, len(payload))
    return zlib.crc32(payload, zlib.crc32(counted, FORMAT if ordinal else 0))


def _next_frame(data: bytes, position: int) -> int | None:
    while (position := data.find(MARKER, position)) >= 0:
        if _frame_at(data, position) is not None:
            return position
        position += 1
    return None


def _is_torn(data: bytes, position: int) -> bool:
    rest = data[position : position + HEAD_SIZE]
    if len(rest) < HEAD_SIZE:
        return rest[:4] == MARKER[: len(rest[:4])]
    marker, ordinal, length, crc = _HEAD.unpack(rest)
    if marker != MARKER or length > MAX_PAYLOAD or position + HEAD_SIZE + length <= len(data):
        return False
    # A whole last frame whose length was damaged also seems to end too early: its checksum shows it.
    payload = data[position + HEAD_SIZE :]
    return bool(_checksum(ordinal, payload) != crc)


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
