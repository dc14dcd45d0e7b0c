"""One forward of a model as it is, under the probe's isolation: which modules ran, how often, on what."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from loopscope.trace.isolation import isolated_forward


@dataclass(slots=True)
class Observed:
    """What one forward showed."""

    order: list[str] = field(default_factory=list)
    """Module names, one per call, as the calls began."""
    first: dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = field(default_factory=dict)
    """Module name → arguments of its first call, of the modules that were asked for."""
    outputs: dict[str, Any] = field(default_factory=dict)
    """Module name → its first output, as shapes: a tuple of ints per tensor, in tuples where tuples were returned."""

    def calls(self, name: str) -> int:
        """Calls of a module."""
        return self.order.count(name)


def call_with(model: nn.Module, batch: Any) -> Any:
    """One forward: a mapping is given as keywords, a tuple or list as positions, anything else alone."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


@contextmanager
def hooked(modules: Mapping[str, nn.Module], make: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    """A pre-hook on each module while the body runs."""
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(make(name), with_kwargs=True).remove)
        yield


def observe(
    model: nn.Module, modules: Mapping[str, nn.Module], batch: Any, arguments_of: Mapping[str, nn.Module]
) -> Observed:
    """Run `model` on `batch` once; state, gradients and random streams are as before afterwards.

    Args:
        model: what is called.
        modules: every module by name; of one with several names, the first is used.
        batch: see `call_with`.
        arguments_of: modules whose arguments are kept.
    """
    seen = Observed()
    unique: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if all(module is not other for other in unique.values()):
            unique[name] = module

    def before(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen.order.append(name)
            if name in arguments_of:
                seen.first.setdefault(name, (args, dict(kwargs)))

        return note

    def after(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            seen.outputs.setdefault(name, shapes(output))

        return note

    with ExitStack() as stack:
        stack.enter_context(isolated_forward(model))
        stack.enter_context(hooked(unique, before))
        for name, module in unique.items():
            stack.callback(module.register_forward_hook(after(name)).remove)
        call_with(model, batch)
    return seen


def shapes(value: Any) -> Any:
    """Tensors as tuples of their sizes, with `tuple` around what was a tuple or list; None for the rest."""
    if isinstance(value, Tensor):
        return tuple(value.shape) if value.is_floating_point() else (str(value.dtype), *value.shape)
    if isinstance(value, (tuple, list)):
        return [shapes(each) for each in value]
    return None
