"""The boundaries of every router of a model, found on copies: units of one kind are examined once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torch import nn

from loopscope.capture.errors import PlanError
from loopscope.capture.fit.calls_experts import Unit
from loopscope.capture.fit.experts import expert_modules
from loopscope.capture.fit.routing_fit import Fit
from loopscope.capture.fit.unit import Found, examine
from loopscope.capture.routing import Balancing, RoutingSpec
from loopscope.capture.spec import CaptureSpec

Boundaries = dict[str, CaptureSpec]
_BY_TRIAL = "the router's behaviour with random weights"


def units_of(modules: Mapping[str, nn.Module]) -> list[Unit]:
    """Every module that holds what may be experts and no other such module deeper inside, in the model's order."""
    held: dict[str, dict[str, int]] = {}
    for name, size in expert_modules(modules).items():
        if name:
            held.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = size
    return [
        Unit(name, modules[name], held[name])
        for name in modules
        if name in held
        and not any(other.startswith(f"{name}." if name else "") for other in held if other != name)
    ]


def routed_units(
    units: Sequence[Unit], widths: Callable[[str], Sequence[int]]
) -> tuple[dict[str, Found], dict[str, str]]:
    """(unit's name → what was found, for units that route; unit's name → why it could not be examined)."""
    examined: list[tuple[Unit, Found]] = []
    routed, unknown = {}, {}
    for unit in units:
        found = next((found for other, found in examined if _of_one_kind(unit, other)), None)
        if found is None:
            found = examine(unit, widths(unit.name))
            examined.append((unit, found))
        if found.routes:
            routed[unit.name] = found
        elif found.why:
            unknown[unit.name] = found.why
    return routed, unknown


def boundaries_of(
    unit: str,
    found: Found,
    *,
    balancing: Callable[[bool], Balancing],
    shared_experts: int = 0,
    advice: str = "",
) -> Boundaries:
    """The boundaries of one routed unit.

    Args:
        unit: its name.
        found: what was found out.
        balancing: what keeps the load even, of a router with (True) or without a bias on its choice.
        shared_experts: experts that every token visits, as the configuration says.
        advice: end of the error's message.

    Raises:
        PlanError: nothing, or more than one description, explains the routing; names all of them.
    """
    if len(found.fits) != 1:
        raise PlanError(f"{unit}: {found.why}.{advice}")
    fit = found.fits[0]
    tensors: dict[str, dict[str, str]] = {}
    for tensor, (module, source) in fit.tensors.items():
        tensors.setdefault(f"{unit}.{module}".rstrip("."), {})[tensor] = source
    routing = _routing(fit, found, balancing, shared_experts)
    first = f"{unit}.{fit.tensors['router_logits'][0]}".rstrip(".")
    return {
        name: CaptureSpec(tensors=sources, routing=routing if name == first else None)
        for name, sources in tensors.items()
    }


def _routing(
    fit: Fit, found: Found, balancing: Callable[[bool], Balancing], shared_experts: int
) -> RoutingSpec:
    fitted = ("num_experts", "top_k", "score_func", "order", "normalised", "route_scale", "gate_bias")
    sources = dict.fromkeys(fitted, _BY_TRIAL) | {"balancing": "config"}
    if "expert_bias" in fit.tensors:
        sources["balancing"] = "the router's bias on its choice"
    if fit.spec.grouped:
        sources |= dict.fromkeys(("num_groups", "groups_per_token"), _BY_TRIAL)
    return replace(
        fit.spec,
        balancing=balancing("expert_bias" in fit.tensors),
        gate_bias=found.gate_bias,
        shared_experts=shared_experts,
        sources=sources,
    )


def _of_one_kind(one: Unit, other: Unit) -> bool:
    """True where copies would do the same; the number of a layer in its list makes no difference."""
    if one.experts != other.experts:
        return False
    pairs = zip_longest(_described(one), _described(other))
    return all(
        a is not None and b is not None and a[0] == b[0] and (a[1] == b[1] or (a[2] and b[2]))
        for a, b in pairs
    )


def _described(unit: Unit) -> Iterator[tuple[Any, Any, bool]]:
    """(what, its value, whether it may be the layer's number) of everything that a copy takes over."""
    numbers = {int(part) for part in unit.name.split(".") if part.isdigit()}
    for name, module in unit.module.named_modules():
        yield name, type(module), False
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, type(None))) and key != "training":
                yield (name, key), value, type(value) is int and value in numbers
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield (name, key), None if tensor is None else tuple(tensor.shape), False
