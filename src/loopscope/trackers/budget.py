"""At most so many keys, however deep the model: a key beyond the budget is refused, counted and told."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from loopscope.errors import ConfigError

T = TypeVar("T")

KEY_LIMIT = 60
"""Keys of one run in a tracker: more than this and nobody finds anything, and the page takes seconds to open."""

_REMEMBERED = 1000


class KeyBudget:
    """Admits keys until `limit` are known.

    Args:
        limit: keys in all.
        reserved: keys that have their place from the start, so that none that comes first takes it.

    Raises:
        ConfigError: `limit` is smaller than what is reserved.
    """

    def __init__(self, limit: int, reserved: Iterable[str] = ()) -> None:
        self._known = set(reserved)
        self._limit = limit
        self._refused: dict[str, None] = {}
        if len(self._known) > limit:
            raise ConfigError(
                f"a tracker may have {limit} keys, but {len(self._known)} are reserved; expected at most {limit}. "
                "Let the tracker make fewer keys of its own."
            )

    @property
    def refused(self) -> tuple[str, ...]:
        """Keys that were refused, the first ones first; at most 1,000 are remembered."""
        return tuple(self._refused)

    def admit(self, values: Mapping[str, T]) -> dict[str, T]:
        """The values whose keys have a place, or still find one."""
        for key in values:
            if key not in self._known:
                if len(self._known) < self._limit:
                    self._known.add(key)
                elif len(self._refused) < _REMEMBERED:
                    self._refused.setdefault(key)
        return {key: value for key, value in values.items() if key in self._known}
