"""What sealing a journal made, so that a part that vanished or broke later can be missed, and its rows counted."""

from __future__ import annotations

from pathlib import Path

import msgspec

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
    write_file(disk, root / JOURNAL_DIR / segment.ledger, msgspec.json.encode(ledger) + b"\n")


def read_ledger(path: Path) -> Ledger | None:
    """The ledger; None where it cannot be read: then the parts must speak for themselves."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ledger)
    except (OSError, msgspec.DecodeError):
        return None
