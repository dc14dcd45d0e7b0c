"""A mapping that cannot be changed, for what is derived once and handed around."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenMapping(Mapping[K, V]):
    """A copy of `items`, read-only; subclasses say what it means."""

    def __init__(self, items: Mapping[K, V]) -> None:
        self._items = MappingProxyType(dict(items))

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
