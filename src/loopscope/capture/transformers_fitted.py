"""A plan for any transformers MoE: layers from the module lists, routers from what copies of them do."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from loopscope.capture.errors import PlanError
from loopscope.capture.fit.boundaries import Boundaries, boundaries_of, routed_units, units_of
from loopscope.capture.fit.layers import layers_around
from loopscope.capture.plan_adapter import plan_of_layers
from loopscope.capture.routing import Balancing, RoutingSpec
from loopscope.capture.spec import CapturePlan
from loopscope.capture.transformers_families import RouterFamily

AUX_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "router_aux_loss_factor")
"""Names that transformers' configurations give the factor of the auxiliary loss."""
_ADVICE = (
    " loopscope.discover(model, batch) shows what was seen and drafts a plan; `plan=` takes it, with"
    " backend='torch'."
)


def fitted_plan(model: nn.Module, modules: Mapping[str, nn.Module]) -> CapturePlan:
    """One block per layer, and every router that copies with random weights give away.

    Raises:
        PlanError: nothing routes, or something that no description, or more than one, explains.
        CoverageError: a layer has several routers.
    """
    units = units_of(modules)
    routed, unknown = routed_units(units, lambda name: _widths(config_of(name, modules)))
    if not routed:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(unknown.items())[:3])
        raise PlanError(
            f"no router was found in {type(model).__name__}: "
            + (why or "it declares no router and holds no experts; expected a MoE model")
            + f".{_ADVICE}"
        )
    boundaries = {}
    for name, found in routed.items():
        config = config_of(name, modules)
        boundaries[name] = boundaries_of(
            name,
            found,
            balancing=partial(_balancing, config),
            shared_experts=_first_int(config, ("n_shared_experts", "num_shared_experts")),
            advice=_ADVICE,
        )
    layers = layers_around(modules, routed)
    outside = [name for name in routed if not any(name in inside for inside in layers.values())]
    if outside:
        raise PlanError(f"{outside[0]} routes and lies in no list of layers.{_ADVICE}")

    def moes_of(layer: str) -> dict[str, Boundaries]:
        return {name: boundaries[name] for name in layers[layer]}

    numbered = [(layer, number, "decode.hidden_states") for number, layer in enumerate(layers)]
    notes = tuple(f"{name}: {why}; nothing was captured there" for name, why in unknown.items())
    plan = plan_of_layers(model, numbered, moes_of, lambda: None, notes=notes)
    looped = {layer: _passes(config_of(layer, modules), layer) for layer in layers}
    return plan.replaced({name: replace(spec, calls=looped.get(name, 1)) for name, spec in plan.items()})


def _passes(config: Any, layer: str) -> int:
    """Calls of a layer in one forward, of a configuration that says which layers are looped."""
    first, end = (_first_int(config, (f"loop_layer_index_{name}",)) for name in ("start", "end"))
    number = int(layer.rpartition(".")[2])
    return max(1, _first_int(config, ("loop_num_passes",))) if first <= number < end else 1


def config_of(name: str, modules: Mapping[str, nn.Module]) -> Any:
    """The configuration of the innermost model around a module; of the whole model where none has one."""
    while name:
        name = name.rpartition(".")[0]
        if (config := getattr(modules.get(name), "config", None)) is not None and hasattr(config, "to_dict"):
            return config
    return getattr(modules.get(""), "config", None)


def _widths(config: Any) -> Sequence[int]:
    found = [_first_int(config, (name,)) for name in ("hidden_size", "d_model", "n_embd", "dim")]
    return [width for width in found if width]


def _first_int(config: Any, names: Sequence[str]) -> int:
    for name in names:
        if type(value := getattr(config, name, None)) is int:
            return value
    return 0


def _balancing(config: Any, biased: bool) -> Balancing:
    if biased:
        return "probability_bias"
    if (shown := getattr(config, "output_router_logits", None)) is None:
        return "unknown"
    factor = next((getattr(config, name) for name in AUX_COEFFICIENTS if hasattr(config, name)), 0)
    return "auxiliary_loss" if shown and factor else "none"


def fitted_family(config: Any, modules: Mapping[str, nn.Module]) -> RouterFamily:
    """How the loss of a model is read whose routers were fitted: its auxiliary loss only where transformers' own
    function computes it, since other formulas are on another scale."""
    named = next((name for name in AUX_COEFFICIENTS if hasattr(config, name)), None)
    homes = {type(part).__module__ for part in modules.values() if hasattr(part, "config")}
    common = any(hasattr(sys.modules.get(home), "load_balancing_loss_func") for home in homes)
    return RouterFamily({}, _no_routing, lambda config, layer: True, named if common else None)


def _no_routing(config: Any) -> RoutingSpec:
    raise PlanError("the routing of a fitted family is not read from its configuration.")
