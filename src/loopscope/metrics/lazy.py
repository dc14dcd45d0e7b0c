"""`functools.cached_property` without its lock, which torch.compile cannot trace before Python 3.12."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as lazy
else:

    def lazy(compute):
        """A property that is computed on first use and kept in the object's `memo`."""
        name = compute.__name__

        def get(self: Any) -> Any:
            if name not in self.memo:
                self.memo[name] = compute(self)
            return self.memo[name]

        return property(get, doc=compute.__doc__)


__all__ = ["lazy"]
