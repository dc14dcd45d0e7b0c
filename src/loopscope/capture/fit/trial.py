"""One run of a copy: every tensor that crosses a boundary of its modules, by the source that names it in a plan."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

Key = tuple[str, str]
"""(module name within the copy, source in the plan's grammar)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one run showed."""

    values: Mapping[Key, Tensor]
    """Inputs and outputs of every module that ran once, then its parameters and buffers."""
    repeated: frozenset[str]
    """Modules that ran more than once; nothing of theirs is in `values`."""
    error: str = ""
    """What ended the run before its end."""

    def read(self, key: Key) -> Tensor:
        """The tensor of a key."""
        return self.values[key]


class Stub(nn.Module):
    """Stands in for experts: returns its first float argument, times 0."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first float tensor, times 0."""
        return (
            next(
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, Tensor) and value.is_floating_point()
            )
            * 0.0
        )


class PassThrough(nn.Module):
    """Stands in for what is beside the point (attention, norms, dense layers): returns its input."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first tensor; with it a None where more than one value was given, as attention returns."""
        given = [*args, *kwargs.values()]
        first = next(value for value in given if isinstance(value, Tensor))
        return first if len(given) == 1 else (first, None)


@dataclass(slots=True)
class _Notes:
    values: dict[Key, Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


def run_trial(copy: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trial:
    """Run `copy` once, without gradients, and note what crosses its boundaries until it ends or raises."""
    notes, error = _Notes(), ""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        for name, module in copy.named_modules():
            handle = module.register_forward_hook(_noting(notes, name), with_kwargs=True)
            stack.callback(handle.remove)
        try:
            copy(*args, **kwargs)
        except Exception as raised:  # noqa: BLE001 - somebody's forward, called without what it expects
            error = f"{type(raised).__name__}: {raised}"
    repeated = frozenset(name for name, calls in notes.calls.items() if calls > 1)
    found = {key: value for key, value in notes.values.items() if key[0] not in repeated}
    for name, module in copy.named_modules():
        for path, tensor in _own_tensors(module):
            found.setdefault((name, f"module.{path}"), tensor)
    return Trial(found, repeated, error)


def _noting(notes: _Notes, name: str) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        notes.calls[name] = notes.calls.get(name, 0) + 1
        for index, value in enumerate(args):
            notes.values |= {(name, text): each for text, each in _tensors(value, f"input[{index}]")}
        for keyword, value in kwargs.items():
            notes.values |= {(name, text): each for text, each in _tensors(value, f"kwarg.{keyword}")}
        notes.values |= {(name, text): each for text, each in _tensors(output, "output")}

    return note


def _tensors(value: Any, text: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield text, value.detach().clone()
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name), f"{text}.{item.name}")
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{text}[{index}]")


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        # A row vector [1, n] is a vector to whoever adds it to [tokens, n].
        yield (name, tensor) if tensor.ndim != 2 or tensor.shape[0] != 1 else (f"{name}[0]", tensor[0])
