"""What sealing a journal made, so that a part that vanished or broke later can be missed, and its rows counted."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loopscope.store.checksum import check_checksum, with_checksum
from loopscope.store.disk import Disk, write_file
from loopscope.store.names import JOURNAL_DIR, Segment


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one segment."""

    rows: dict[str, int]
    """Table → rows."""
    crc32: dict[str, str]
    """Table → CRC-32 of its part, as in the part's name."""
    lost: int = 0
    """Rows of the journal that could not be read."""


def write_ledger(disk: Disk, root: Path, segment: Segment, ledger: Ledger) -> None:
    """Put it beside the journal. Raises OSError."""
    write_file(disk, root / JOURNAL_DIR / segment.ledger, with_checksum(msgspec.json.encode(ledger)))


def read_ledger(path: Path) -> Ledger:
    """The ledger.

    Raises:
        ValueError: it is damaged; the parts must then speak for themselves.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    try:
        ledger = msgspec.json.decode(data, type=Ledger)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    check_checksum(data)
    return ledger
