"""A derived plan and a user's overrides, resolved and checked before anything is attached."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from loopscope.capture.draft import draft_spec
from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import suggestion
from loopscope.capture.override import CONTRACT, FIELDS, is_sentinel, read_override, resolve_field
from loopscope.capture.spec import ROUTER_TENSORS, CapturePlan, CaptureSpec, enclosing

_SHOWN = 8


def resolve_plan(
    derived: CapturePlan, overrides: Mapping[str, Any] | None, modules: Mapping[str, Any]
) -> CapturePlan:
    """Merge, insert and expand `overrides`; neither argument is changed, so planning twice gives one plan.

    Args:
        derived: what the adapter found.
        overrides: module name or glob → `Capture` or a mapping of its fields. Entries are applied in order, and blocks
            that are inserted are promised to run in the order in which they are written.
        modules: every module of the model by name.

    Raises:
        PlanError: anything that is wrong, with the place and the nearest right name.
    """
    boundaries = dict(derived)
    for key, value in (overrides or {}).items():
        where = f"plan[{key!r}]"
        if not isinstance(key, str) or not key:
            raise PlanError(f"plan has the key {key!r}, expected the name of a module or a glob.")
        written = read_override(value, where)
        if any(sign in key for sign in "*?["):
            _apply_glob(key, written, boundaries, modules, where)
        elif key in boundaries:
            boundaries[key] = _merged(boundaries[key], written, where)
        elif key in modules:
            boundaries[key] = _inserted(key, written, modules[key], where)
        else:
            raise PlanError(f"{where}: the model has no module of this name.{suggestion(key, modules)}")
    plan = derived.replaced(boundaries)
    check_plan(plan)
    return plan


def check_plan(plan: CapturePlan) -> None:
    """Raise PlanError where the boundaries do not make visits."""
    blocks = plan.blocks()
    for name, spec in plan.items():
        where = f"plan[{name!r}]"
        spec.sources(where)
        if not set(spec.tensors) & set(ROUTER_TENSORS) or spec.merge == "none":
            continue
        owner = enclosing(name, blocks)
        if owner is None:
            raise PlanError(
                f"{where}: a router outside every block: no boundary around it captures `residual`, so its visits "
                "have no place in the depth. Add the layer it belongs to, with tensors: {residual: output}."
            )
    for name in blocks:
        parts = plan.parts_of(name)
        if parts:
            _check_router(name, parts)


def _check_router(block: str, parts: Mapping[str, CaptureSpec]) -> None:
    seen: dict[str, str] = {}
    for part, spec in parts.items():
        for tensor in spec.tensors:
            if tensor in ROUTER_TENSORS and seen.setdefault(tensor, part) != part:
                raise PlanError(
                    f"plan[{part!r}]: {tensor} of block {block!r} is captured at {seen[tensor]!r} as well; a visit "
                    "has one router. Give the inner layer a boundary with `residual` of its own."
                )
    missing = [name for name in ("router_logits", "topk_idx") if name not in seen]
    if missing:
        raise PlanError(
            f"plan[{next(iter(parts))!r}]: block {block!r} has router tensors {sorted(seen)} without "
            f"{' and '.join(missing)}, which nothing else gives. Capture {' and '.join(missing)}, or no router."
        )
    if all(spec.routing is None for spec in parts.values()):
        raise PlanError(
            f"plan[{seen['topk_idx']!r}]: no `routing`; expected a RoutingSpec: without it nothing can be "
            "reconciled with what the model did. Give num_experts, top_k, score_func, order, normalised, balancing."
        )


def _merged(spec: CaptureSpec, written: Mapping[str, Any], where: str) -> CaptureSpec:
    changed = {}
    for name, value in written.items():
        old = getattr(spec, name)
        new = resolve_field(name, value, old, where)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and new is not old:
            dropped = sorted(set(old) - set(new))
            if dropped:
                warnings.warn(f"{where}.{name} drops what was derived: {', '.join(dropped)}", stacklevel=4)
        changed[name] = new
    return replace(spec, **changed)


def _inserted(key: str, written: Mapping[str, Any], module: Any, where: str) -> CaptureSpec:
    for name, value in written.items():
        if is_sentinel(name, value):
            raise PlanError(
                f"{where}.{name} is {value!r}, but nothing was derived at this module; expected a value. "
                f"A draft:\n{draft_spec(key, module)}"
            )
    missing = [name for name in CONTRACT if name not in written]
    if missing:
        raise PlanError(
            f"{where}: nothing was derived at this module, so the whole contract is needed; "
            f"{', '.join(missing)} not set. A draft:\n{draft_spec(key, module)}"
        )
    return CaptureSpec(**{name: resolve_field(name, value, None, where) for name, value in written.items()})


def _apply_glob(
    key: str,
    written: Mapping[str, Any],
    boundaries: dict[str, CaptureSpec],
    modules: Mapping[str, Any],
    where: str,
) -> None:
    matched = [name for name in modules if name and fnmatchcase(name, key)]
    if not matched:
        near = suggestion(key.translate(str.maketrans("", "", "*?[]")), modules)
        raise PlanError(f"{where}: the glob matches no module.{near}")
    unknown = [name for name in matched if name not in boundaries]
    full = all(name in written and not is_sentinel(name, written[name]) for name in CONTRACT)
    if unknown and not full:
        if len(unknown) == len(matched) or not set(written) <= set(FIELDS):
            hint = "none of what it matches is a boundary"
        else:
            hint = f"{len(unknown)} of {len(matched)} matches are no boundaries"
        shown = ", ".join(unknown[:_SHOWN]) + (", ..." if len(unknown) > _SHOWN else "")
        raise PlanError(
            f"{where}: {hint}: {shown}. Narrow the glob to derived boundaries, or declare the full contract "
            f"({', '.join(CONTRACT)}) so that it inserts."
        )
    for name in matched:
        if name in boundaries:
            boundaries[name] = _merged(boundaries[name], written, where)
        else:
            boundaries[name] = _inserted(name, written, modules[name], where)
