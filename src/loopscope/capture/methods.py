"""A method as a boundary of its own, for models that choose, or update their state, outside every module."""

from typing import Any

from torch import nn

from loopscope.capture.nearest import suggestion
from loopscope.errors import ConfigError


class _Method(nn.Module):
    """Calls a bound method; has no parameters and no buffers."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


def method_boundary(module: nn.Module, *methods: str) -> None:
    """Let a capture plan name methods of `module`, as if they were child modules of the same names.

    ``method_boundary(moe, "route")`` makes ``….moe.route`` a name that `input[0]` and `output[1]` can be taken from.
    What the model computes, its parameters and its state dict stay as they are. A second call changes nothing.

    Args:
        module: the module whose own code calls the methods as ``self.method(...)``.
        methods: their names.

    Raises:
        ConfigError: the module has no such method, or something else has its name.
    """
    for name in methods:
        if isinstance(module._modules.get(name), _Method):
            continue
        if not callable(getattr(type(module), name, None)) or name in module._modules:
            known = [key for key in dir(type(module)) if callable(getattr(type(module), key))]
            raise ConfigError(
                f"{type(module).__name__} has no method {name!r}, expected the name of one.{suggestion(name, known)}"
            )
        # Among the children, so that it has a name; in the instance, since a class's own method is found before those.
        module._modules[name] = module.__dict__[name] = _Method(getattr(module, name))
