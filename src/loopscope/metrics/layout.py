"""Where each partial sum sits in the two float64 vectors of a visit or of a pair of visits."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Slices of the SUM and the MAX vector. Fixed by the shape alone, so that it can be a cross-rank buffer.

    Equal arguments of `visit_layout` and `pair_layout` give the very same object.
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
