"""Hooks on mlx modules, which have none: an instance gets a subclass of its own class for as long as needed."""

from collections.abc import Callable
from functools import partial
from typing import Any

Around = Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
"""(module, args, kwargs, call) → output; `call()` runs the module's own ``__call__``."""


def hook(module: Any, around: Around) -> Callable[[], None]:
    """Run `around` in place of every call of `module`; returns what undoes it.

    A copy or a pickle of the module is a module of its own class again.
    """
    own: Any = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own_call = partial(own.__call__, self, *args, **kwargs)
        return around(self, args, kwargs, own_call) if self is module else own_call()  # else a copy

    def reduce(self: Any, protocol: Any) -> Any:
        _, arguments, *rest = own.__reduce_ex__(self, protocol)
        return (_rebuilt, (own, *arguments[1:]), *rest)

    hooked = type(
        own.__name__, (own,), {"__call__": call, "__reduce_ex__": reduce, "__module__": own.__module__}
    )
    module.__class__ = hooked

    def remove() -> None:
        if type(module) is hooked:
            module.__class__ = own

    return remove


def _rebuilt(own: Any, *arguments: Any) -> Any:
    return own.__new__(own, *arguments)
