"""A writer that shows the rules every row on its way to the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from loopscope.alerts.observer import AlertObserver, HealthRows


class _Rows(HealthRows, Protocol):
    def flush(self, durable: bool = False) -> None: ...
    def close(self) -> None: ...


class AlertingWriter(AlertObserver):
    """Hands every row on, then judges it or its trace.

    Args:
        inner: writes the rows.
        options: of `AlertObserver`.
    """

    def __init__(self, inner: _Rows, *args: Any, **options: Any) -> None:
        super().__init__(inner, *args, **options)
        self._inner = inner

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Hand one row on, then judge it or its trace."""
        self._inner.append(table, row)
        self.see(table, (row,))

    def append_many(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """The same for several rows of one table."""
        many = getattr(self._inner, "append_many", None)
        if many is not None:
            many(table, rows)
        else:
            for row in rows:
                self._inner.append(table, row)
        self.see(table, rows)

    def flush(self, durable: bool = False) -> None:
        """Hand on."""
        super().flush()
        self._inner.flush(durable=durable)

    def settle(self) -> None:
        """Judge what is left and wait a little for deliveries; rows are still taken."""
        super().close()

    def close(self) -> None:
        """Judge what is left, wait a little for deliveries, and hand on."""
        try:
            self.settle()
        finally:
            self._inner.close()

    @property
    def dropped(self) -> int:
        """Rows that could not be written so far."""
        return self._inner.dropped
