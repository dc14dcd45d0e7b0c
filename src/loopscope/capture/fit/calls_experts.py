"""A module that calls experts, and how it was seen to be called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.capture.fit.trial import Key


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that calls experts."""

    name: str
    module: nn.Module
    experts: Mapping[str, int]
    """Name of each candidate within the module → number of experts."""
    call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    """Arguments that it was called with, where a forward was seen."""

    def listed(self) -> list[str]:
        """Candidates whose experts are called one by one: plain containers, without a forward of their own."""
        return [name for name in self.experts if not has_forward(self.module.get_submodule(name))]

    def called_as_experts(self) -> list[nn.Module]:
        """What a stub stands in for."""
        found: list[nn.Module] = []
        for name in self.experts:
            module = self.module.get_submodule(name)
            found += [module] if has_forward(module) else list(module.children())
        return found

    def holds(self, name: str) -> bool:
        """True for a module that is experts, or one expert of several."""
        return name in self.experts or name.rpartition(".")[0] in self.experts

    def enters(self, key: Key) -> bool:
        """True for what experts are called with."""
        return self.holds(key[0]) and key[1].startswith(("input", "kwarg"))

    def hidden(self) -> Tensor:
        """The first float argument of the call."""
        assert self.call is not None
        return next(value for value in _flat(self.call) if value.is_floating_point() and value.ndim > 1)

    def other_numbers(
        self, generator: torch.Generator, *, zero: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with random floats of variance 1 in place of its own; zeros where `zero`."""
        assert self.call is not None

        def other(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not value.is_floating_point():
                    return value.detach().to("cpu", copy=True)
                return torch.randn(value.shape, generator=generator) * (0.0 if zero else 1.0)
            if type(value) in (tuple, list):
                return type(value)(other(each) for each in value)
            return value

        args, kwargs = self.call
        return tuple(other(value) for value in args), {name: other(value) for name, value in kwargs.items()}


def has_forward(module: nn.Module) -> bool:
    """False for a container that only holds its items."""
    return type(module).forward is not nn.Module.forward


def _flat(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[Tensor]:
    args, kwargs = call
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
