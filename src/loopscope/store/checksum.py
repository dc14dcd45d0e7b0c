"""A JSON document that says its own CRC-32, in its last member: a flipped bit that still parses is found."""

from __future__ import annotations

import re
import zlib

_LAST = re.compile(rb',\s*"checksum":\s*"crc32:([0-9a-f]{8})"\s*\}\s*\Z')
_LONGEST = 80
"""Bytes that the last member takes at most, from its comma to the end of the file."""


def with_checksum(document: bytes) -> bytes:
    """The document with a last member ``"checksum"``, which covers every byte before that member's comma.

    Args:
        document: a JSON object with at least one member.
    """
    body = document.rstrip().removesuffix(b"}").rstrip()
    gap, end = (b"\n  ", b"\n}\n") if b"\n" in body else (b"", b"}\n")
    return b'%s,%s"checksum":%s"crc32:%08x"%s' % (body, gap, b" " if gap else b"", zlib.crc32(body), end)


def check_checksum(data: bytes) -> None:
    """Return where the document is what was written; one without a checksum, of an older version, is believed.

    A newer version's document is checked alike, whatever members it has.

    Raises:
        ValueError: its content and its checksum differ.
    """
    last = _LAST.search(data, max(0, len(data) - _LONGEST))
    if last is None:
        return
    found, said = f"{zlib.crc32(data[: last.start()]):08x}", last[1].decode()
    if found != said:
        raise ValueError(
            f"its content has CRC-32 {found}, it says {said}: it was damaged, or changed by hand. After a change on "
            'purpose, remove its last line ("checksum") and the comma before it'
        )
