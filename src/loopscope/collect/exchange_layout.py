"""Where each visit and transition lies in the two buffers of a traced step.

SUM buffer: `STEP_SUMS`, then `SLOT_HEADER` of every slot, then the sums, [slots, n_sum] per layout of partial vectors.
MAX buffer: `STEP_MAXIMA`, then the maxima, [slots, n_max] per layout.

Ranks that exchange make it from `expected_visits` alone, so that every rank has the same one whatever it saw. A step of
smaller R leaves the later loop steps' slots empty, and its tail uses the slots of the largest R's tail. One rank makes
it from what it saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loopscope.collect.coverage import at_depth
from loopscope.collect.pairs import Key, Pair, plan_pairs
from loopscope.metrics import Layout, pair_layout, visit_layout
from loopscope.metrics.tensors import SCORE_FUNCS
from loopscope.trace import VisitSpec

STEP_SUMS = ("failed_ranks", "unexpected", "sink_faults", "trace_bytes")
"""What the SUM buffer says of the step: ranks that failed as a whole, visits and pairs that have no slot because nobody
promised them, positions that were recorded twice, bytes of the traces."""
STEP_MAXIMA = ("num_stacks", "minus_num_stacks", "num_microbatches", "step", "minus_step")
"""What the MAX buffer says of the step; R and its number from both sides, so that ranks that differ are found."""
SLOT_HEADER = ("times_seen", "failures", "selection_scores", *SCORE_FUNCS)
"""What the SUM buffer says of each slot: what its merged vectors are made of."""


@dataclass(frozen=True, slots=True)
class SlotRange:
    """The slots of one layout of partial vectors, side by side."""

    layout: Layout
    slots: slice
    sums: slice
    """Of the SUM buffer: [slots, n_sum]."""
    maxima: slice
    """Of the MAX buffer: [slots, n_max]."""


class ExchangeLayout:
    """The slot of every visit and transition, and the lengths of the buffers.

    Args:
        layouts: visit or pair → layout of its partial vectors; None for one that has no vectors, only a header.
        expected: the promised visits, at the largest R, where ranks exchange by it.
    """

    def __init__(self, layouts: Mapping[Key, Layout | None], expected: tuple[VisitSpec, ...] = ()) -> None:
        self.expected = expected
        groups: dict[Layout | None, list[Key]] = {}
        for key, layout in layouts.items():
            groups.setdefault(layout, []).append(key)
        self.layouts = [layout for layout, keys in groups.items() for _ in keys]
        """Every slot's layout of partial vectors."""
        self._slots = {key: slot for slot, key in enumerate(key for keys in groups.values() for key in keys)}
        self.ranges: list[SlotRange] = []
        """Every layout's slots, in the order of the buffers."""
        self.n_sum, self.n_max = len(STEP_SUMS) + len(SLOT_HEADER) * len(self.layouts), len(STEP_MAXIMA)
        for layout, keys in groups.items():
            if layout is not None:
                first, count = self._slots[keys[0]], len(keys)
                sums = slice(self.n_sum, self.n_sum + count * layout.n_sum)
                maxima = slice(self.n_max, self.n_max + count * layout.n_max)
                self.ranges.append(SlotRange(layout, slice(first, first + count), sums, maxima))
                self.n_sum, self.n_max = sums.stop, maxima.stop
        self._at: dict[int, Mapping[Key, int]] = {}

    @classmethod
    def of_expected(cls, expected: Iterable[VisitSpec]) -> ExchangeLayout:
        """The layout of a promise, the same on every rank."""
        visits = tuple(sorted(expected))
        keys: list[Key] = [*visits, *plan_pairs(visits)]
        return cls({key: layout_of(key) for key in keys}, visits)

    def at(self, num_stacks: int | None) -> Mapping[Key, int]:
        """Visit or pair → slot, as a step of `num_stacks` loop steps has them; none where R is not known."""
        if not self.expected:
            return self._slots
        if num_stacks is None:
            return {}
        if num_stacks not in self._at:
            self._at[num_stacks] = self._at_depth(num_stacks)
        return self._at[num_stacks]

    def _at_depth(self, num_stacks: int) -> Mapping[Key, int]:
        present = at_depth(self.expected, num_stacks)
        # Head and loop keep their positions. The tail moves up, in order, and what leads to it begins elsewhere.
        moved: dict[Key, Key] = {
            visit: known
            for visit, known in zip(_tail(present), _tail(self.expected), strict=True)
            if visit != known
        }
        exits = [key for key in self._slots if isinstance(key, Pair) and key.kind == "exit"]
        moved.update((pair, known) for pair in plan_pairs(present) if pair.kind == "exit" for known in exits)
        keys: list[Key] = [*present, *plan_pairs(present)]
        return {key: self._slots[known] for key in keys if (known := moved.get(key, key)) in self._slots}


def layout_of(key: Key) -> Layout:
    """The layout of a visit's or a transition's partial vectors.

    Raises:
        MetricInputError: E and k do not fit each other, or those of the two visits of one layer differ.
    """
    if isinstance(key, VisitSpec):
        return visit_layout(key.num_experts, key.top_k)
    source, target = key.source, key.target
    return pair_layout(
        key.kind, key.same_layer, (source.num_experts, source.top_k), (target.num_experts, target.top_k)
    )


def _tail(visits: Iterable[VisitSpec]) -> list[VisitSpec]:
    return [visit for visit in visits if visit.block == "tail"]
