"""JSON documents that end in their own CRC-32, so that a flipped bit that still parses is found.

run.json, the records of attempts and the ledgers are written and read through this module alone.
"""

import re
import zlib
from typing import TypeVar

import msgspec

_LAST = re.compile(rb',\s*"checksum":\s*"(?:crc32:([0-9a-f]{8})|none)"\s*\}\s*\Z')
_LONGEST = 80
"""Bytes that the last member takes at most, from its comma to the end of the file."""
_FIX = 'After a change on purpose, make `"checksum": "none"` its last member'

# A trainer's configuration holds types, paths and enums: their text is what a reader wants to see.
_encode = msgspec.json.Encoder(enc_hook=str).encode
_Document = TypeVar("_Document", bound=msgspec.Struct)


def encode_document(content: msgspec.Struct, indent: int = 0) -> bytes:
    """The struct as JSON with its checksum; TypeError or ValueError where JSON cannot hold it.

    Args:
        content: at least one field.
        indent: blanks per level; 0 puts all on one line.
    """
    text = _encode(content)
    return with_checksum(msgspec.json.format(text, indent=indent) if indent else text)


def decode_document(data: bytes, kind: type[_Document]) -> _Document:
    """The struct that `encode_document` wrote. Members that `kind` does not know are covered too, and left out.

    Raises:
        ValueError: it is no such document, or `check_checksum` refuses it.
    """
    try:
        document = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    check_checksum(data)
    return document


def with_checksum(document: bytes) -> bytes:
    """The document with a last member ``"checksum"``, which covers every byte before that member's comma.

    Args:
        document: a JSON object with at least one member.
    """
    body = document.rstrip().removesuffix(b"}").rstrip()
    gap, end = (b"\n  ", b"\n}\n") if b"\n" in body else (b"", b"}\n")
    return b'%s,%s"checksum":%s"crc32:%08x"%s' % (body, gap, b" " if gap else b"", zlib.crc32(body), end)


def check_checksum(data: bytes) -> None:
    """Return where the document matches its checksum, or ends in ``"checksum": "none"``: an edit on purpose.

    Raises:
        ValueError: its content and its checksum differ, or it has none.
    """
    last = _LAST.search(data, max(0, len(data) - _LONGEST))
    if last is None:
        raise ValueError(f"it does not end in a checksum: it was cut off, or changed by hand. {_FIX}")
    found, stored = b"%08x" % zlib.crc32(data[: last.start()]), last[1]
    if stored not in (None, found):
        raise ValueError(
            f"the CRC-32 of its content is {found.decode()}, its checksum says {stored.decode()}: it was damaged, or "
            f"changed by hand. {_FIX}"
        )
