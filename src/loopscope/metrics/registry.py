"""The computation of every declared column, found by the name that the catalogue gives, and the vectors' layouts.

A metric is a declaration in `loopscope.catalog.tables` and a file here with a `FAMILY`. Loading this module fails where
one of the two is missing, or where a family gives other columns than are declared.
"""

import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from loopscope.catalog.bins import NUM_BINS
from loopscope.catalog.registry import TABLES
from loopscope.catalog.tables.transition import PAIR_KINDS
from loopscope.catalog.traits import NAMES
from loopscope.errors import MetricInputError, SchemaError
from loopscope.metrics import residual, router, tokens, transition
from loopscope.metrics.family import Family, Partials, Slot
from loopscope.metrics.layout import Layout
from loopscope.metrics.loss import finish_loss


def _families(package: Any) -> dict[str, Family[Any]]:
    """Name → family, of every file of a package that holds one, in the order of the declared columns."""
    modules = {
        each.name: import_module(f"{package.__name__}.{each.name}")
        for each in pkgutil.iter_modules(package.__path__)
    }
    found = {name: module.FAMILY for name, module in modules.items() if hasattr(module, "FAMILY")}
    table = package.__name__.rpartition(".")[2]
    declared = tuple(dict.fromkeys(c.computed for c in TABLES[table].columns if c.computed))
    if missing := [name for name in declared if name not in found]:
        raise SchemaError(
            f"catalogue table {table!r} has columns computed by {missing}, expected a FAMILY in "
            f"{package.__name__.replace('.', '/')}/<name>.py. Add the file, or correct `computed`."
        )
    return {name: found[name] for name in (*declared, *(name for name in found if name not in declared))}


_ROUTER, _RESIDUAL, _TRANSITION = _families(router), _families(residual), _families(transition)


@cache
def visit_families(num_experts: int) -> tuple[Family[Any], ...]:
    """Families of a visit with E experts (0: dense), in the order of its partial vectors."""
    return (tokens.FAMILY, *(_ROUTER.values() if num_experts else ()), *_RESIDUAL.values())


@cache
def pair_families(kind: str, same_layer: bool, num_experts: int) -> tuple[Family[Any], ...]:
    """Families of a transition, in the order of its partial vectors."""
    wanted = {
        "delta": True,
        "update": kind == "step_boundary",
        "input_distance": kind == "from_input",
        "overlap": same_layer and num_experts > 0,
    }
    return (tokens.FAMILY, *(family for name, family in _TRANSITION.items() if wanted[name]))


def families_of(layout: Layout) -> tuple[Family[Any], ...]:
    """The families of a layout, in the order of its partial vectors."""
    if layout.kind == "visit":
        return visit_families(layout.num_experts)
    return pair_families(layout.kind, layout.same_layer, layout.num_experts)


@cache
def visit_layout(num_experts: int, top_k: int) -> Layout:
    """The layout of a visit with E experts of which k are chosen; both 0 for a dense visit.

    Raises:
        MetricInputError: not 1 <= k <= E, nor both 0.
    """
    if not (num_experts == top_k == 0 or 1 <= top_k <= num_experts):
        raise MetricInputError(
            f"num_experts={num_experts}, top_k={top_k}: expected 1 <= top_k <= num_experts, or both 0 for a "
            "dense visit. Take both from the layer's own tensors."
        )
    return _layout(visit_families(num_experts), num_experts, top_k, "visit", False)


@cache
def pair_layout(
    kind: str, same_layer: bool, from_experts_k: tuple[int, int], to_experts_k: tuple[int, int]
) -> Layout:
    """The layout of a transition.

    Args:
        kind: one of `PAIR_KINDS`.
        same_layer: both visits are executions of one physical layer; only then are expert sets compared.
        from_experts_k: (E, k) of the first visit, (0, 0) where dense.
        to_experts_k: (E, k) of the second visit, (0, 0) where dense.

    Raises:
        MetricInputError: unknown kind, or one layer with two values of (E, k).
    """
    if kind not in PAIR_KINDS:
        raise MetricInputError(f"transition kind is {kind!r}, expected one of {', '.join(PAIR_KINDS)}.")
    if same_layer and from_experts_k != to_experts_k:
        raise MetricInputError(
            f"one physical layer has (num_experts, top_k) = {from_experts_k} and {to_experts_k}; expected "
            "equal values. Take both from the layer's own tensors; layer_idx counts physical layers."
        )
    num_experts, top_k = to_experts_k if same_layer else (0, 0)
    return _layout(pair_families(kind, same_layer, num_experts), num_experts, top_k, kind, same_layer)


def _layout(
    families: tuple[Family[Any], ...], num_experts: int, top_k: int, kind: str, same_layer: bool
) -> Layout:
    sums, n_sum = _place((slot for family in families for slot in family.sums), num_experts)
    maxima, n_max = _place((slot for family in families for slot in family.maxima), num_experts)
    return Layout(num_experts, top_k, kind, same_layer, sums, maxima, n_sum, n_max)


def _place(slots: Iterable[Slot], num_experts: int) -> tuple[Mapping[str, slice], int]:
    sizes = {"1": 1, "E": num_experts, "bins": NUM_BINS, "traits": len(NAMES)}
    slices: dict[str, slice] = {}
    end = 0
    for slot in slots:
        assert slot.name not in slices, f"slot {slot.name} declared twice"
        slices[slot.name] = slice(end, end + sizes[slot.size])
        end += sizes[slot.size]
    return MappingProxyType(slices), end


def _check() -> None:
    """Raise SchemaError where a family gives other columns than the catalogue declares for it."""
    layouts = (visit_layout(2, 1), *(pair_layout(kind, True, (2, 1), (2, 1)) for kind in PAIR_KINDS))
    for layout in layouts:
        nothing = Partials.of(layout, np.zeros((1, layout.n_sum)), np.zeros((1, layout.n_max)))
        for family in families_of(layout):
            with np.errstate(all="ignore"):
                given = set(family.finish(nothing)) if family.finish is not None else set()
            _same(family.module, given, {column.name for column in family.columns})
    nothing_lost = finish_loss(
        task_loss=0.0, lb_loss=0.0, lb_loss_factor=0.0, z_loss=0.0, z_loss_factor=0.0, total_loss=0.0
    )
    _same("loopscope.metrics.loss", set(nothing_lost.columns), set(TABLES["loss"].metrics))


def _same(module: str, given: set[str], declared: set[str]) -> None:
    if given != declared:
        raise SchemaError(
            f"{module} gives columns {sorted(given - declared)} that the catalogue does not declare for it, and lacks "
            f"{sorted(declared - given)}; declare them in loopscope/catalog/tables/, or compute them."
        )


_check()
