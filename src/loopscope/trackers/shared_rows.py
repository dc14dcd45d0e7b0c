"""Rows into a W&B run that somebody else logs to with steps of its own.

W&B keeps one open row per run, at an internal step. ``log(..., step=n)`` closes the open row where n is larger, adds
to it where n is equal, and is **thrown away** where n is smaller; ``commit=True`` closes it and moves the internal
step on by one. torchtitan logs with its training step. So a row of ours may close the open row only while the
internal step stays at or below the training step that is under way: then every later row of the owner still counts.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

MOST_WAITING = 4096
"""Rows that wait for a place; the oldest go where there are more."""


class SharedRows:
    """Gives every row of ours a place of its own, or one beside a row of the owner: that of the same training step
    where ours comes in time.

    Nothing is ever logged with ``step=``, so no row of ours can be thrown away. Rows whose place would cost the owner
    one of its rows wait: they come late, at the end at the latest. That happens where the run's internal step is
    ahead of the training step, as after a resume into the same W&B run.

    Args:
        run: a `wandb.Run` that is under way.
    """

    def __init__(self, run: Any) -> None:
        self.lost = 0
        """Rows that found no place: more than MOST_WAITING waited."""
        self._run = run
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._now = 0
        self._open: tuple[int, int] | None = (
            None  # (internal step, training step) of our row that is still open
        )
        self._empty = -1  # an internal step whose row is known to be empty

    def put(self, step: int, row: Mapping[str, Any]) -> None:
        """Place the row of training step `step`, and those that wait."""
        self._now = max(self._now, step)
        self._waiting.append((step, row))
        while self._waiting and self._place(*self._waiting[0]):
            self._waiting.popleft()
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self.lost += 1

    def finish(self) -> None:
        """Place what waits; nobody logs after this."""
        if self._waiting:
            self._close()
        while self._waiting:
            self._run.log(dict(self._waiting.popleft()[1]), commit=True)

    def _place(self, step: int, row: Mapping[str, Any]) -> bool:
        internal = self._run.step
        ours = self._open is not None and self._open[0] == internal
        if not ours:
            self._open = None
        beside = self._open is not None and self._open[1] == step
        if not beside and internal < self._now and internal != self._empty and internal != step:
            # The owner's row of another step, or ours: it is complete, since its step is over.
            self._close()
            internal += 1
        elif ours and not beside:
            return False
        # Where there is no room before the owner's row it is put beside it; its own step says whose values they are.
        may_close = internal < self._now
        self._run.log(dict(row), commit=may_close)
        self._open = None if may_close else (internal, step)
        # The owner's next step is at least the present one: it cannot add to a row that lies before that.
        self._empty = internal + 1 if internal + 1 < self._now else -1
        return True

    def _close(self) -> None:
        self._run.log({}, commit=True)
        self._open = None
