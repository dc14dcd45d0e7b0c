"""Writers without a disk: rows in memory for tests and notebooks, and none at all."""

from collections.abc import Mapping, Sequence


class MemoryWriter:
    """Keeps rows in lists by table."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, object]]] = {}
        self.closed = False
        self.flushes = 0
        self.dropped = self.fsync_failures = 0

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

    dropped = fsync_failures = 0

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Drop the row."""

    def append_many(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Drop the rows."""

    def flush(self, durable: bool = False) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
