"""A process of an attempt that writes no rows: all it leaves is the error that ended it, if one did."""

from collections.abc import Callable
from typing import Any

from loopscope.store.locks import Lock


class Bystander:
    """Takes what `endings` notes about such a process; makes a file only once there is an error.

    Args:
        make: makes the file. Raises OSError or StoreError.
        keep: attempt and name under which it stays.
    """

    def __init__(self, make: Callable[[], Lock], keep: str) -> None:
        self._make, self._keep = make, keep

    def open_blocks(self) -> dict[str, int]:
        """It records no signal: healthy ranks get one when another dies."""
        return {}

    def has_signal(self) -> bool:
        """Not known."""
        return False

    def note(self, **changes: Any) -> None:
        """Leave a record. Raises OSError or StoreError."""
        lock = self._make()
        lock.note(**changes)
        lock.release(keep=self._keep)
