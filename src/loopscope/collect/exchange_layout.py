"""Where each visit and transition sits in the two buffers that ranks exchange.

The layout comes from `expected_visits` alone, so every rank has the same one whatever it saw. A step of smaller
R leaves the later loop steps' places empty, and its tail uses the places of the largest R's tail.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loopscope.collect.coverage import at_depth
from loopscope.collect.pairs import Pair, plan_pairs
from loopscope.metrics import Layout, pair_layout, visit_layout
from loopscope.trace import VisitSpec

HEADER = ("microbatches", "failures", "sigmoid", "selection_scores")
"""What precedes each visit's and pair's sums: numbers that say what the merged vector is made of."""


@dataclass(frozen=True, slots=True)
class Place:
    """One visit's or pair's piece of the buffers."""

    layout: Layout
    sum_start: int
    """Of its header in the SUM buffer; the sums follow the header."""
    max_start: int
    """Of its maxima in the MAX buffer."""

    @property
    def header(self) -> slice:
        """Its header in the SUM buffer."""
        return slice(self.sum_start, self.sum_start + len(HEADER))

    @property
    def sums(self) -> slice:
        """Its sums in the SUM buffer."""
        start = self.sum_start + len(HEADER)
        return slice(start, start + self.layout.n_sum)

    @property
    def maxima(self) -> slice:
        """Its maxima in the MAX buffer."""
        return slice(self.max_start, self.max_start + self.layout.n_max)


_PairName = tuple[object, ...]


class ExchangeLayout:
    """Places of every visit and transition, and the lengths of the buffers."""

    def __init__(self, expected: Iterable[VisitSpec]) -> None:
        self.expected = tuple(sorted(expected))
        self._visits: dict[int, Place] = {}
        self._pairs: dict[_PairName, Place] = {}
        self.places: list[Place] = []
        """Every place, in the order of the buffers."""
        self.n_sum = self.n_max = 0
        for index, spec in enumerate(self.expected):
            self._visits[index] = self._place(visit_layout(spec.num_experts, spec.top_k))
        index_of = {spec.unrolled_pos: index for index, spec in enumerate(self.expected)}
        for pair in plan_pairs(self.expected):
            self._pairs[_name(pair, index_of)] = self._place(layout_of(pair))

    def at(
        self, num_stacks: int
    ) -> tuple[dict[VisitSpec, Place], dict[tuple[str, int, int], tuple[Pair, Place]]]:
        """The places of a step of `num_stacks` loop steps, by the visits and pairs as they then are."""
        present = at_depth(self.expected, num_stacks)
        # at_depth keeps the order, so that walking both gives each present visit its place at the largest R.
        kept = [
            index
            for index, spec in enumerate(self.expected)
            if spec.block != "loop" or spec.loop_step < num_stacks
        ]
        visits = {spec: self._visits[index] for spec, index in zip(present, kept, strict=True)}
        index_of = {spec.unrolled_pos: index for spec, index in zip(present, kept, strict=True)}
        pairs = {pair.key: (pair, self._pairs[_name(pair, index_of)]) for pair in plan_pairs(present)}
        return visits, pairs

    def _place(self, layout: Layout) -> Place:
        place = Place(layout, self.n_sum, self.n_max)
        self.n_sum += len(HEADER) + layout.n_sum
        self.n_max += layout.n_max
        self.places.append(place)
        return place


def layout_of(pair: Pair) -> Layout:
    """The layout of a transition's partial vectors."""
    source, target = pair.source, pair.target
    return pair_layout(
        pair.kind, pair.same_layer, (source.num_experts, source.top_k), (target.num_experts, target.top_k)
    )


def _name(pair: Pair, index_of: dict[int, int]) -> _PairName:
    # The last loop visit depends on R, the tail's place does not: there is one `exit`, whatever it comes from.
    if pair.kind == "exit":
        return (pair.kind,)
    return (pair.kind, index_of[pair.source.unrolled_pos], index_of[pair.target.unrolled_pos])
