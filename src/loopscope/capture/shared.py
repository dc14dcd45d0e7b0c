"""Modules that a model holds under several names: one block, called as often as all its names together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import shortened
from loopscope.capture.spec import CapturePlan, CaptureSpec, enclosing


def without_aliases(plan: CapturePlan, modules: Mapping[str, Any]) -> CapturePlan:
    """The plan with each block under the first of its names, and `calls` of all of them added up.

    Four layers that share their weights as one module are a loop of four passes. What lies inside a block goes with it.

    Args:
        plan: every boundary by name.
        modules: name → module, shared ones under each of their names.

    Raises:
        PlanError: two names of one module say different things.
    """
    blocks = plan.blocks()
    first: dict[int, str] = {}
    alias_of = {
        name: first[id(modules[name])] for name in blocks if first.setdefault(id(modules[name]), name) != name
    }
    named = {id(modules[name]) for name in plan if enclosing(name, blocks)}
    found: dict[str, CaptureSpec] = {}
    for name, spec in plan.items():
        if spec.block is None and not enclosing(name, blocks) and id(modules[name]) in named:
            continue  # a glob has met what lies in a block under a name outside it
        own = _under_first_name(name, alias_of)
        known = found.get(own)
        if known is None:
            found[own] = spec
            continue
        if (_without_numbers(known)) != _without_numbers(spec):
            raise PlanError(
                f"plan[{name!r}]: this is the module {own!r} under another name, and captures something else; expected "
                f"one description. Give {own!r} alone, with the number of its `calls`."
            )
        if name in alias_of:
            calls = None if None in (known.calls, spec.calls) else (known.calls or 0) + (spec.calls or 0)
            found[own] = replace(known, calls=calls)
    if not alias_of:
        return plan.replaced(found)
    names = shortened([f"{alias} is {name}" for alias, name in alias_of.items()])
    note = f"{len(alias_of)} block(s) are other blocks under a second name: {names}"
    merged = plan.replaced(found)
    return CapturePlan(merged, declared_layers=plan.declared_layers, notes=(*plan.notes, note))


def _under_first_name(name: str, alias_of: Mapping[str, str]) -> str:
    outer = name
    while outer:
        if outer in alias_of:
            return alias_of[outer] + name[len(outer) :]
        outer = outer.rpartition(".")[0]
    return name


def _without_numbers(spec: CaptureSpec) -> CaptureSpec:
    return replace(spec, calls=1, layer=None)
