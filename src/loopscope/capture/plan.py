"""A derived plan and a user's overrides, resolved and checked before anything is attached."""

import inspect
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import shortened, suggestion
from loopscope.capture.override import CONTRACT, is_sentinel, read_override, resolve_field
from loopscope.capture.proof_status import missing_tensors
from loopscope.capture.shared import without_aliases
from loopscope.capture.spec import ROUTER_TENSORS, CapturePlan, CaptureSpec, enclosing


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
    check_plan(plan := without_aliases(derived.replaced(boundaries), modules))
    return plan


def check_plan(plan: CapturePlan) -> None:
    """Raise PlanError where the boundaries do not make visits."""
    blocks = plan.blocks()
    for name, spec in plan.items():
        spec.sources(f"plan[{name!r}]")
        if not set(spec.tensors) & set(ROUTER_TENSORS) or spec.merge == "none":
            continue
        if spec.block is not None:
            _check_beside(name, spec, blocks)
        elif enclosing(name, blocks) is None:
            raise PlanError(
                f"plan[{name!r}]: a router outside every block: no boundary around it captures `residual`, so its "
                "visits have no place in the depth. Add the layer it belongs to, with tensors: {residual: output}; or, "
                "where its state is another module's output, name that block: `block: NAME`."
            )
    for name in blocks:
        if parts := plan.parts_of(name):
            _check_router(name, parts)


def _check_beside(name: str, spec: CaptureSpec, blocks: Mapping[str, CaptureSpec]) -> None:
    if spec.block not in blocks:
        raise PlanError(
            f"plan[{name!r}].block is {spec.block!r}, expected a boundary that captures `residual`."
            f"{suggestion(str(spec.block), blocks)}"
        )
    if spec.is_block:
        raise PlanError(
            f"plan[{name!r}]: it captures `residual` and names the block {spec.block!r}; expected one of both. A "
            "router of another block captures no residual."
        )
    if "expert_input" in spec.tensors:
        raise PlanError(
            f"plan[{name!r}]: expert_input of a module outside its block cannot be counted: an expert that is not "
            "called would shift the calls of the others. Make the block a module around its experts."
        )


def _check_router(block: str, parts: Mapping[str, CaptureSpec]) -> None:
    seen: dict[str, str] = {}
    for part, spec in parts.items():
        for tensor in spec.tensors:
            if tensor == "expert_input":  # one boundary for each expert
                continue
            if tensor in ROUTER_TENSORS and seen.setdefault(tensor, part) != part:
                raise PlanError(
                    f"plan[{part!r}]: {tensor} of block {block!r} is captured at {seen[tensor]!r} as well; a visit "
                    "has one router. Where a layer has several, make each mixture a block of its own, with `residual` "
                    "at it, and give the layer none."
                )
    routing = next((spec.routing for spec in parts.values() if spec.routing is not None), None)
    problem = missing_tensors(seen, routing)
    if problem is not None:
        raise PlanError(
            f"plan[{next(iter(parts))!r}]: block {block!r} has router tensors {sorted(seen)} {problem}"
        )
    if routing is None:
        raise PlanError(
            f"plan[{seen['router_logits']!r}]: no `routing`; expected a RoutingSpec: without it nothing can be "
            "reconciled with what the model did. Give num_experts, top_k, score_func, order, normalised, balancing."
        )
    experts = [name for name, spec in parts.items() if "expert_input" in spec.tensors]
    if experts and len(experts) != routing.num_experts:
        raise PlanError(
            f"plan[{experts[0]!r}]: expert_input is captured at {len(experts)} module(s) of block {block!r}, expected "
            f"one for each of its {routing.num_experts} experts, in their order."
        )


def _merged(spec: CaptureSpec, written: Mapping[str, Any], where: str) -> CaptureSpec:
    changed = {}
    for name, value in written.items():
        old = getattr(spec, name)
        new = resolve_field(name, value, old, where)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and (dropped := sorted(set(old) - set(new))):
            warnings.warn(f"{where}.{name} drops what was derived: {', '.join(dropped)}", stacklevel=4)
        changed[name] = new
    return replace(spec, **changed)


def _inserted(key: str, written: Mapping[str, Any], module: Any, where: str) -> CaptureSpec:
    for name, value in written.items():
        if is_sentinel(name, value):
            raise PlanError(
                f"{where}.{name} is {value!r}, but nothing was derived at this module; expected a value. "
                f"A draft:\n{_draft_spec(key, module)}"
            )
    if missing := [name for name in CONTRACT if name not in written]:
        raise PlanError(
            f"{where}: nothing was derived at this module, so the whole contract is needed; "
            f"{', '.join(missing)} not set. A draft:\n{_draft_spec(key, module)}"
        )
    return CaptureSpec(**{name: resolve_field(name, value, None, where) for name, value in written.items()})


def _draft_spec(name: str, module: Any) -> str:
    """YAML that can be completed and pasted into the plan."""
    return "\n".join(
        (
            f"{name}:  # {type(module).__name__}.{_signature_of(module)}",
            "  tensors: {residual: 'output'}  # for a router: router_logits, topk_idx and a `routing`",
            "  placements: {}",
            "  merge: sum",
        )
    )


def _signature_of(module: Any) -> str:
    """``forward(x, mask=None)``, as text; mlx modules have ``__call__`` instead."""
    name = "forward" if callable(getattr(type(module), "forward", None)) else "__call__"
    try:
        parameters = list(inspect.signature(getattr(type(module), name)).parameters.values())[1:]
    except (TypeError, ValueError):
        return f"{name}(...)"
    return f"{name}({', '.join(str(each.replace(annotation=each.empty)) for each in parameters)})"


def _apply_glob(
    key: str,
    written: Mapping[str, Any],
    boundaries: dict[str, CaptureSpec],
    modules: Mapping[str, Any],
    where: str,
) -> None:
    if not (matched := [name for name in modules if name and fnmatchcase(name, key)]):
        raise PlanError(
            f"{where}: the glob matches no module."
            f"{suggestion(key.translate(str.maketrans('', '', '*?[]')), modules)}"
        )
    unknown = [name for name in matched if name not in boundaries]
    if unknown and not all(name in written and not is_sentinel(name, written[name]) for name in CONTRACT):
        hint = f"{len(unknown)} of {len(matched)} matches are no boundaries"
        if len(unknown) == len(matched):
            hint = "none of what it matches is a boundary"
        raise PlanError(
            f"{where}: {hint}: {shortened(unknown)}. Narrow the glob to derived boundaries, or declare the full "
            f"contract ({', '.join(CONTRACT)}) so that it inserts."
        )
    for name in matched:
        fields = dict(written)
        if isinstance(block := written.get("block"), str):
            fields["block"] = block.replace("*", _matched_by(key, name))
        boundaries[name] = (
            _merged(boundaries[name], fields, where)
            if name in boundaries
            else _inserted(name, fields, modules[name], where)
        )


def _matched_by(glob: str, name: str) -> str:
    """What the first `*` or `?` of a glob stands for in a name that it matches."""
    pattern = re.sub(r"\\\*|\\\?", lambda sign: "(.*)" if sign[0] == r"\*" else "(.)", re.escape(glob))
    found = re.fullmatch(pattern, name, re.DOTALL)
    return found[1] if found and found.groups() else ""
