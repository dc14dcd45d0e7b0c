"""A user's own metric at a boundary, as a decorated factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import suggestion

CONTEXT = ("module", "mesh", "dp_mesh", "tp_mesh", "ep_mesh", "cp_mesh")
"""What loopscope can fill in; reserved names."""

Reduce = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Captured tensors of one call by name → values by name; they are written as health rows."""


@dataclass(frozen=True, slots=True)
class ReducerFactory:
    """A factory with what it declared. Calling it binds the user's keys and checks them."""

    function: Callable[..., Reduce]
    """Makes the reducer from its context and keys."""
    context: tuple[str, ...]
    """Context it wants; exactly this is filled in, by name."""
    collective: bool
    """True where it communicates: it must then be reached by every rank."""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    def __call__(self, **keys: Any) -> BoundReducer:
        """Bind the configured keys.

        Raises:
            PlanError: a key is reserved for context, or is no parameter of the factory, or one is missing.
        """
        return self.bind(keys, f"reducer {self.name}")

    def bind(self, keys: Mapping[str, Any], where: str) -> BoundReducer:
        """As calling it; errors start with `where`."""
        parameters = inspect.signature(self.function).parameters
        own = [name for name in parameters if name not in CONTEXT]
        for key in keys:
            if key in CONTEXT:
                raise PlanError(
                    f"{where}: key {key!r} is reserved: loopscope fills it in where the factory declares it as "
                    "context. Use another name."
                )
            if key not in own:
                raise PlanError(f"{where}: {self.name} has no parameter {key!r}.{suggestion(str(key), own)}")
        for name in own:
            if name not in keys and parameters[name].default is inspect.Parameter.empty:
                raise PlanError(f"{where}: {self.name} needs {name!r}, which is not configured.")
        return BoundReducer(self, dict(keys))


@dataclass(frozen=True, slots=True)
class BoundReducer:
    """A factory with its keys, ready to be built once the model is there."""

    factory: ReducerFactory
    keys: Mapping[str, Any]

    def build(self, context: Mapping[str, Any]) -> Reduce:
        """Make the reducer; `context` holds module and meshes by name."""
        chosen = {name: context.get(name) for name in self.factory.context}
        if missing := [name for name, value in chosen.items() if value is None]:
            raise PlanError(
                f"reducer {self.factory.name}: {', '.join(missing)} is not there in this run. Run it under a "
                "mesh that has it, or drop the reducer."
            )
        return self.factory.function(**chosen, **self.keys)


def reducer(
    *, collective: bool, context: tuple[str, ...] = ()
) -> Callable[[Callable[..., Reduce]], ReducerFactory]:
    """Declare a factory of a custom metric.

    Args:
        collective: whether it communicates. No default: a collective that only some ranks reach hangs the run.
        context: which of `CONTEXT` the factory wants as keyword arguments.

    Raises:
        PlanError: unknown context, a context name that is no parameter, or ``**kwargs`` in the signature.
    """
    if not isinstance(collective, bool):
        raise PlanError(f"reducer: collective is {collective!r}, expected True or False.")
    for name in context:
        if name not in CONTEXT:
            raise PlanError(f"reducer: no context {name!r}.{suggestion(name, CONTEXT)}")

    def declare(function: Callable[..., Reduce]) -> ReducerFactory:
        parameters = inspect.signature(function).parameters
        for parameter in parameters.values():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                raise PlanError(
                    f"reducer {function.__name__}: *{parameter.name} would swallow misspelt keys; name every "
                    "parameter."
                )
            if parameter.name in CONTEXT and parameter.name not in context:
                raise PlanError(
                    f"reducer {function.__name__}: parameter {parameter.name!r} is context that is not declared. "
                    f"Write reducer(context=({parameter.name!r},), ...)."
                )
        for name in context:
            if name not in parameters:
                raise PlanError(
                    f"reducer {function.__name__}: context {name!r} is declared but no parameter."
                )
        return ReducerFactory(function, tuple(context), collective)

    return declare


def as_factory(value: Any, where: str) -> ReducerFactory:
    """A declared factory; a plain function is refused, since it does not declare whether it communicates."""
    if not isinstance(value, ReducerFactory):
        raise PlanError(
            f"{where}: {value!r} is no reducer factory; whether it communicates must be declared. Decorate it with "
            "@loopscope.capture.reducer(collective=False) (or True)."
        )
    return value
