"""`loopscope.discover`: what a model is made of, seen in one forward, with a plan that was proven on it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.capture.errors import CoverageError, PlanError, ReconcileError
from loopscope.capture.files import dump_plan
from loopscope.capture.fit.boundaries import units_of
from loopscope.capture.fit.calls_experts import has_forward
from loopscope.capture.fit.draft import Draft, draft_of
from loopscope.capture.fit.observe import Observed, call_with, hooked, observe
from loopscope.capture.hooks import plain_modules
from loopscope.capture.spec import CapturePlan
from loopscope.capture.torch_adapter import TorchAdapter
from loopscope.errors import ConfigError
from loopscope.trace.isolation import isolated_forward


@dataclass(frozen=True, slots=True)
class DiscoveredModule:
    """One module of interest."""

    name: str
    kind: str
    """Its class."""
    role: str
    """"block", "router", or "block, router"."""
    calls: int
    """Calls in the forward."""
    output: str
    """Shape of what it returned first."""
    routing: str
    """How it routes, where it is a router."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What `discover` found. Printing it gives the table and the plan."""

    modules: list[DiscoveredModule]
    """Blocks and routers, in the order in which they first ran."""
    shared: dict[str, list[str]]
    """Name → other names of the same module."""
    plan: CapturePlan | None
    """A plan that was proven on the batch; `overrides` gives it to `attach`. None: none was."""
    missing: list[str] = field(default_factory=list)
    """What could not be found, or was not proven, in sentences."""

    def yaml(self) -> str:
        """The plan as YAML, as `attach(plan=...)` and `loopscope plan --config` read it; empty without one."""
        return "" if self.plan is None else dump_plan(self.plan)

    def overrides(self) -> dict[str, Any]:
        """The plan as `attach(plan=...)` takes it."""
        return {} if self.plan is None else {name: spec.plain() for name, spec in self.plan.items()}

    def __str__(self) -> str:
        rows = [("module", "class", "role", "calls", "returns", "routing")]
        rows += [(m.name, m.kind, m.role, str(m.calls), m.output, m.routing) for m in self.modules]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines += [f"{name} is also {', '.join(others)}" for name, others in self.shared.items()]
        lines += [f"not found: {each}" for each in self.missing]
        lines += ["", "proven on this batch:", self.yaml().rstrip()] if self.plan is not None else []
        return "\n".join(lines)


def discover(model: nn.Module, batch: Any) -> Discovery:
    """Run one forward and find blocks, routers and how they route; draft a plan, and prove it on the same batch.

    The forward runs in eval mode without gradients; parameters, buffers, gradients, modes and random streams are bit
    for bit as before. The plan is proven twice: each choice is recomputed from the captured scores, and counts are
    compared with what the experts themselves were handed.

    Args:
        model: any torch module; what you call in training.
        batch: a mapping (keywords), a tuple or list (positions), or one value.

    Raises:
        ConfigError: `model` is no torch module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"discover() got a {type(model).__name__}, expected a torch.nn.Module.")
    modules = plain_modules(model)
    units = {unit.name: unit.module for unit in units_of(modules)}
    seen = observe(model, modules, batch, units)
    draft = draft_of(modules, seen)
    plan = _proven(model, batch, modules, draft)
    return Discovery(
        modules=_table(modules, seen, draft),
        shared=_shared(modules, seen),
        plan=plan,
        missing=draft.missing,
    )


def _proven(
    model: nn.Module, batch: Any, modules: Mapping[str, nn.Module], draft: Draft
) -> CapturePlan | None:
    if not draft.units:
        return None
    overrides = {name: spec.plain() for name, spec in draft.boundaries.items()}
    handed: dict[str, list[list[int]]] = {}
    try:
        adapter = TorchAdapter(model, overrides=overrides)
        places = _experts(modules, draft)
        watched = {name: modules[name] for name in places}
        with (
            isolated_forward(model),
            hooked(watched, _counting(handed, places)),
            adapter.listening() as window,
        ):
            call_with(model, batch)
            points, blocks = window.points(), window.blocks()
            window.clear()
    except (PlanError, CoverageError, ReconcileError) as error:
        draft.missing.append(f"The draft is not proven: {error}")
        return None
    counted: dict[str, list[list[int]]] = {}
    for block, point in zip(blocks, points, strict=True):
        if block in draft.units and point.topk_idx is not None:
            used = point.topk_idx.reshape(-1).long()
            counts = torch.bincount(used[used >= 0], minlength=point.num_experts).tolist()
            counted.setdefault(draft.units[block], []).append(counts)
    for unit, counts in counted.items():
        if _without_zeros(handed.get(unit, [])) != _without_zeros(counts):
            draft.missing.append(
                f"The draft is not proven: {unit}: its experts were handed {handed.get(unit)} tokens, the plan says "
                f"{counts}."
            )
            return None
    return adapter.plan


def _without_zeros(counts: list[list[int]]) -> list[dict[int, int]]:
    return [{expert: count for expert, count in enumerate(call) if count} for call in counts]


def _experts(modules: Mapping[str, nn.Module], draft: Draft) -> dict[str, tuple[str, int, int]]:
    """Module name → (unit, number of experts, which expert it is): -1 for a unit, -2 for experts called as one."""
    found: dict[str, tuple[str, int, int]] = {}
    for unit in draft.units.values():
        size = max(draft.experts[unit].values())
        found[unit] = (unit, size, -1)
        for name in draft.experts[unit]:
            path = f"{unit}.{name}"
            if has_forward(modules[path]):
                found[path] = (unit, size, -2)
            else:
                children = enumerate(modules[path].named_children())
                found |= {f"{path}.{child}": (unit, size, number) for number, (child, _) in children}
    return found


def _counting(
    handed: dict[str, list[list[int]]], places: Mapping[str, tuple[str, int, int]]
) -> Callable[[str], Callable[..., None]]:
    """Hooks that count what experts are handed in each call of their unit: by indices, or by rows of each expert."""

    def make(name: str) -> Callable[..., None]:
        unit, size, which = places[name]

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if which == -1:
                handed.setdefault(unit, []).append([0] * size)
            elif which >= 0:
                handed[unit][-1][which] += args[0].shape[:-1].numel()
            else:
                given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
                idx = next((value for value in given if not value.is_floating_point()), None)
                if idx is not None:
                    handed[unit][-1] = torch.bincount(idx.reshape(-1).long(), minlength=size).tolist()

        return note

    return make


def _table(modules: Mapping[str, nn.Module], seen: Observed, draft: Draft) -> list[DiscoveredModule]:
    found = []
    for name, spec in sorted(draft.boundaries.items(), key=lambda item: seen.order.index(item[0])):
        roles = (["block"] if spec.is_block else []) + (
            ["router"] if len(spec.tensors) > spec.is_block else []
        )
        said = spec.routing
        found.append(
            DiscoveredModule(
                name=name,
                kind=type(modules[name]).__name__,
                role=", ".join(roles),
                calls=seen.calls(name),
                output=str(seen.outputs.get(name)),
                routing=""
                if said is None
                else f"E {said.num_experts}, k {said.top_k}, {said.score_func}, {said.order}",
            )
        )
    return found


def _shared(modules: Mapping[str, nn.Module], seen: Observed) -> dict[str, list[str]]:
    """Modules that ran and have several names; what lies inside of one is left out."""
    names: dict[int, list[str]] = {}
    for name, module in modules.items():
        names.setdefault(id(module), []).append(name)
    found = {
        group[0]: group[1:] for group in names.values() if len(group) > 1 and group[0] in set(seen.order)
    }
    return {
        name: others
        for name, others in found.items()
        if not any(name.startswith(f"{outer}.") for outer in found)
    }
