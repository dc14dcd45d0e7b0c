"""Where each partial sum sits in the two float64 vectors of a visit or of a pair of visits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args

from loopscope.errors import MetricInputError
from loopscope.metrics.histogram import NUM_BINS
from loopscope.metrics.metric import Family, Slot

PairKind = Literal["within_step", "step_boundary", "wrap", "from_input", "entry", "exit"]
PAIR_KINDS: tuple[str, ...] = get_args(PairKind)


@dataclass(frozen=True, slots=True)
class Layout:
    """Slices of the SUM and the MAX vector. Fixed by the shape alone, so that it can be a cross-rank buffer.

    Equal arguments give the very same object.
    """

    num_experts: int
    """E; 0 where there is no router (of a pair: where no expert sets are compared)."""
    top_k: int
    """k; 0 where there is no router."""
    kind: str
    """"visit", or the kind of the pair."""
    same_layer: bool
    """Pairs only: both visits are executions of one physical layer."""
    sum_slices: Mapping[str, slice]
    """Slot name → its slice of the SUM vector."""
    max_slices: Mapping[str, slice]
    """Slot name → its slice of the MAX vector."""
    n_sum: int
    """Length of the SUM vector."""
    n_max: int
    """Length of the MAX vector."""

    def __hash__(self) -> int:
        return hash((self.num_experts, self.top_k, self.kind, self.same_layer))


def _place(slots: Iterable[Slot], num_experts: int) -> tuple[Mapping[str, slice], int]:
    sizes = {"1": 1, "E": num_experts, "bins": NUM_BINS}
    slices: dict[str, slice] = {}
    end = 0
    for slot in slots:
        assert slot.name not in slices, f"slot {slot.name} declared twice"
        slices[slot.name] = slice(end, end + sizes[slot.size])
        end += sizes[slot.size]
    return MappingProxyType(slices), end


def _layout(
    families: Iterable[Family[Any]], num_experts: int, top_k: int, kind: str, same_layer: bool
) -> Layout:
    families = tuple(families)
    sums, n_sum = _place((slot for family in families for slot in family.sums), num_experts)
    maxima, n_max = _place((slot for family in families for slot in family.maxima), num_experts)
    return Layout(num_experts, top_k, kind, same_layer, sums, maxima, n_sum, n_max)


@cache
def visit_layout(num_experts: int, top_k: int) -> Layout:
    """The layout of a visit with E experts of which k are chosen; both 0 for a dense visit.

    Raises:
        MetricInputError: not 1 <= k <= E, nor both 0.
    """
    from loopscope.metrics.registry import visit_families

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
    from loopscope.metrics.registry import pair_families

    if kind not in PAIR_KINDS:
        raise MetricInputError(f"transition kind is {kind!r}, expected one of {', '.join(PAIR_KINDS)}.")
    if same_layer and from_experts_k != to_experts_k:
        raise MetricInputError(
            f"one physical layer has (num_experts, top_k) = {from_experts_k} and {to_experts_k}; expected "
            "equal values. Take both from the layer's own tensors; layer_idx counts physical layers."
        )
    num_experts, top_k = to_experts_k if same_layer else (0, 0)
    return _layout(pair_families(kind, same_layer, num_experts), num_experts, top_k, kind, same_layer)
