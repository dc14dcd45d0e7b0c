"""What rows are written to: the one protocol of every writer."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class RowWriter(Protocol):
    """Takes rows as dictionaries of plain Python values; columns that are missing are null.

    `JournalWriter` is the store's own. Every method and both counts are there in every writer.
    """

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Add one row."""

    def append_many(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows of one table in one call. A row that does not fit takes no other along."""

    def flush(self, durable: bool = False) -> None:
        """Hand what is buffered to the operating system; to the disk as well where `durable`."""

    def close(self) -> None:
        """Write everything and stop. A second call does nothing."""

    @property
    def dropped(self) -> int:
        """Rows that could not be written so far."""

    @property
    def fsync_failures(self) -> int:
        """Times that the disk refused to make rows durable; such rows are still with the operating system."""
