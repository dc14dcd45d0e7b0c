"""A draft plan from one observed forward: blocks in the order they ran, routers as copies gave them away."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from loopscope.capture.errors import PlanError
from loopscope.capture.fit.boundaries import boundaries_of, routed_units, units_of
from loopscope.capture.fit.layers import layers_around
from loopscope.capture.fit.observe import Observed
from loopscope.capture.routing import Balancing
from loopscope.capture.spec import CaptureSpec


@dataclass(slots=True)
class Draft:
    """A plan that was not proven yet."""

    boundaries: dict[str, CaptureSpec] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    """Block → the module in it that calls its experts."""
    experts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Unit → name of its experts' modules → number of experts."""
    missing: list[str] = field(default_factory=list)
    """What could not be found, in sentences."""


def draft_of(modules: Mapping[str, nn.Module], seen: Observed) -> Draft:
    """The draft; whatever stays open is said in `missing`."""
    draft = Draft()
    ran = set(seen.order)
    units = [replace(unit, call=seen.first.get(unit.name)) for unit in units_of(modules) if unit.name in ran]
    routed, unknown = routed_units(units, lambda name: ())
    draft.missing += [f"{name}: {why}." for name, why in unknown.items()]
    found: dict[str, dict[str, CaptureSpec]] = {}
    for name, what in routed.items():
        try:
            found[name] = boundaries_of(
                name, what, balancing=lambda biased: "probability_bias" if biased else "unknown"
            )
        except PlanError as error:
            draft.missing.append(str(error))
    draft.experts = {unit.name: dict(unit.experts) for unit in units if unit.name in found}
    if not found:
        draft.missing.append("No router was found: nothing that calls experts could be explained.")
        return draft
    blocks = _blocks(modules, seen, list(found))
    for unit in found:
        if not any(unit in inside for inside in blocks.values()):
            draft.missing.append(
                f"{unit}: no module around it returns [batch, sequence, width]; it has no block."
            )
    numbers = {name: number for number, name in enumerate(blocks)}
    for name in sorted(blocks, key=seen.order.index):
        if (source := residual_source(seen.outputs.get(name))) is None:
            draft.missing.append(f"{name}: it returns no [batch, sequence, width]; it is left out.")
            continue
        if len(blocks[name]) > 1:
            draft.missing.append(
                f"{name}: {len(blocks[name])} routers ({', '.join(blocks[name])}); none is taken."
            )
        draft.boundaries[name] = CaptureSpec(
            tensors={"residual": source}, layer=numbers[name], calls=seen.calls(name)
        )
        if len(blocks[name]) == 1:
            (unit,) = blocks[name]
            draft.units[name] = unit
            _add(draft.boundaries, found[unit])
    return draft


def _balancing(biased: bool) -> Balancing:
    return "probability_bias" if biased else "unknown"


def _add(boundaries: dict[str, CaptureSpec], inside: Mapping[str, CaptureSpec]) -> None:
    for name, spec in inside.items():
        known = boundaries.get(name)
        if known is None:
            boundaries[name] = spec
        else:  # the block is the unit itself
            boundaries[name] = replace(known, tensors={**known.tensors, **spec.tensors}, routing=spec.routing)


def residual_source(output: Any) -> str | None:
    """Where an observed output has [batch, sequence, width]."""
    if _is_residual(output):
        return "output"
    if isinstance(output, list) and output and _is_residual(output[0]):
        return "output[0]"
    return None


def _is_residual(shape: Any) -> bool:
    return isinstance(shape, tuple) and len(shape) == 3 and all(isinstance(size, int) for size in shape)


def _blocks(modules: Mapping[str, nn.Module], seen: Observed, units: Sequence[str]) -> dict[str, list[str]]:
    """Block → the units in it: items of the lists of layers that ran, else the outermost module around one unit."""
    blocks = {name: inside for name, inside in layers_around(modules, units).items() if seen.calls(name)}
    placed = {unit for inside in blocks.values() for unit in inside}
    for unit in units:
        if unit not in placed and (block := _outermost(unit, units, seen)):
            blocks.setdefault(block, []).append(unit)
    kinds = {type(modules[name]) for name in blocks}
    alike: dict[str, list[str]] = {
        name: []
        for name, module in modules.items()
        if type(module) in kinds
        and seen.calls(name)
        and not any(_around(name, block) or _around(block, name) for block in blocks)
    }
    return {**blocks, **alike}


def _around(outer: str, inner: str) -> bool:
    return outer == inner or inner.startswith(f"{outer}.")


def _outermost(unit: str, units: Sequence[str], seen: Observed) -> str | None:
    found, name = None, unit
    while name:
        alone = sum(_around(name, other) for other in units) == 1
        if alone and seen.calls(name) == seen.calls(unit) and residual_source(seen.outputs.get(name)):
            found = name
        name = name.rpartition(".")[0]
    return found
