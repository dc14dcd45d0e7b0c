"""What a collector writes to, and an in-memory twin of it for tests and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class RowWriter(Protocol):
    """Takes rows as dictionaries of plain Python values; keys that are missing are null.

    A writer may also have ``append_many(table, rows)``: the rows of one table and step then come in one call.
    """

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Add one row."""
        ...

    def flush(self, durable: bool = False) -> None:
        """Hand what is buffered to the operating system; to the disk as well where `durable`."""
        ...

    def close(self) -> None:
        """Write everything and stop. A second call does nothing."""
        ...

    @property
    def dropped(self) -> int:
        """Rows that could not be written so far."""
        ...


def append_rows(writer: RowWriter, table: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Add rows of one table; at once where the writer has `append_many`, which spares a system call per row."""
    append_many = getattr(writer, "append_many", None)
    if append_many is not None:
        append_many(table, rows)
        return
    for row in rows:
        writer.append(table, row)


class MemoryWriter:
    """Keeps rows in lists by table."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, object]]] = {}
        self.closed = False
        self.flushes = 0
        self.dropped = 0

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Keep a copy of the row."""
        self.tables.setdefault(table, []).append(dict(row))

    def append_many(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Keep a copy of each row."""
        for row in rows:
            self.append(table, row)

    def flush(self, durable: bool = False) -> None:
        """Count the call."""
        self.flushes += 1

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def rows(self, table: str, **equal: object) -> list[dict[str, object]]:
        """The rows of `table` whose columns equal the given values."""
        return [
            row
            for row in self.tables.get(table, [])
            if all(row.get(key) == value for key, value in equal.items())
        ]


class NullWriter:
    """Takes rows and drops them: for ranks that only take part in the reductions."""

    dropped = 0

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Drop the row."""

    def append_many(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Drop the rows."""

    def flush(self, durable: bool = False) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
