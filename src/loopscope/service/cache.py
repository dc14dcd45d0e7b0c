"""Results that are made once for however many ask, and forgotten before they fill the memory."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")
Key = tuple[str, ...]


@dataclass(slots=True)
class _Made:
    version: str
    result: Any
    size: int
    begun: float
    """When the look at the files behind it began, on the monotonic clock."""


class ResultCache:
    """By key and version; the least recently asked ones go when there are too many or they are too large."""

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._made: OrderedDict[Key, _Made] = OrderedDict()
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        self.bytes = 0
        """Size of everything that is kept."""

    async def get(
        self, key: Key, version: Callable[[], str], make: Callable[[], T], size: Callable[[T], int]
    ) -> T:
        """What `make` gives for the present version.

        A live run changes all the time. Whoever waited while another's look at the files began gets that one's
        result: it is as new as what was asked for, and fifty pages on one live run cost as much as one.

        Args:
            key: what is asked for.
            version: says whether it has changed; called in a thread.
            make: makes it; called in a thread, by one at a time.
            size: bytes of a result.
        """
        asked = time.monotonic()
        # A lock lives as long as somebody holds it or waits for it.
        async with self._locks.setdefault(key, asyncio.Lock()):
            found = self._made.get(key)
            if found is None or found.begun < asked:
                begun = time.monotonic()
                now = await run_in_threadpool(version)
                if found is None or found.version != now:
                    result = await run_in_threadpool(make)
                    found = _Made(version=now, result=result, size=size(result), begun=begun)
                found.begun = begun
                self._keep(key, found)
            return found.result  # type: ignore[no-any-return]

    def _keep(self, key: Key, made: _Made) -> None:
        old = self._made.pop(key, None)
        self.bytes += made.size - (old.size if old is not None else 0)
        self._made[key] = made  # the last to go
        while len(self._made) > self._most or (self.bytes > self._most_bytes and len(self._made) > 1):
            self.bytes -= self._made.popitem(last=False)[1].size
