"""The ledger of a sealed journal: its parts and their rows, so that a part that is lost later is noticed."""

from __future__ import annotations

import msgspec


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one segment."""

    rows: dict[str, int]
    """Table → rows."""
    crc32: dict[str, str]
    """Table → CRC-32 of its part, as in the part's name."""
    lost: int = 0
    """Rows of the journal that could not be read."""
