"""The one place that hands rows to the store, and then to what looks at them: alerts and trackers."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from loopscope.store import RowWriter


class RowObserver(Protocol):
    """Looks at rows after the writer took them. It raises under ``on_error="raise"`` alone."""

    def see(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of one table that were written, in order; none at a flush, to write down what is to be said."""

    def close(self) -> None:
        """Do what is left; rows may still come, from those that close later. A second call does nothing."""


class ObservedWriter:
    """A `RowWriter` with observers beside it.

    1. A `timing` row also counts the seconds that the observers named in `timed` took since the last one.
    2. The writer takes the rows: they reach the store whatever an observer does.
    3. The observers see them, in their order.

    An observer's own rows go to an `ObservedWriter` of the same writer and of the observers before it, which see them;
    so no observer sees its own rows. In a run the order is: alerts, then trackers. What happens to a tracker is
    judged like any other event; an alert's row goes to the store alone, and trackers are told the alert itself.

    At the end the observers close in their order, and then the writer: the last alerts still find the trackers open.
    Every one has its turn, whatever another raises.

    Args:
        writer: takes the rows.
        observers: in the order in which they see them.
        timed: name in `timing` rows → the observer whose seconds count.
    """

    def __init__(
        self,
        writer: RowWriter,
        observers: Sequence[RowObserver],
        *,
        timed: Mapping[str, RowObserver] | None = None,
    ) -> None:
        self._writer, self._observers = writer, tuple(observers)
        self._names = {id(observer): name for name, observer in (timed or {}).items()}
        self._seconds = dict.fromkeys(self._names.values(), 0.0)

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Add one row."""
        self.append_many(table, (row,))

    def append_many(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Add rows of one table."""
        if table == "health" and self._seconds:
            rows = [self._with_seconds(row) if row.get("event") == "timing" else row for row in rows]
        self._writer.append_many(table, rows)
        self._show(table, rows)

    def flush(self, durable: bool = False) -> None:
        """Let the observers write what they have to say, and flush the writer."""
        self._show("", ())
        self._writer.flush(durable=durable)

    def close(self) -> None:
        """Close the observers, then the writer."""
        with ExitStack() as stack:
            stack.callback(self._writer.close)
            for observer in reversed(self._observers):
                stack.callback(observer.close)

    @property
    def dropped(self) -> int:
        """Rows that could not be written so far."""
        return self._writer.dropped

    @property
    def fsync_failures(self) -> int:
        """Times that the disk refused to make rows durable."""
        return self._writer.fsync_failures

    def _show(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        for observer in self._observers:
            began = time.perf_counter()
            try:
                observer.see(table, rows)
            finally:
                if (name := self._names.get(id(observer))) is not None:
                    self._seconds[name] += time.perf_counter() - began

    def _with_seconds(self, row: Mapping[str, Any]) -> dict[str, object]:
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        detail = {**json.loads(row["detail"]), **{name: round(value, 6) for name, value in taken.items()}}
        return {**row, "value": row["value"] + sum(taken.values()), "detail": json.dumps(detail)}
