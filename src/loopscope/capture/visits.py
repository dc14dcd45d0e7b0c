"""From calls in execution order to coordinates of depth: head, loop, tail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from loopscope.capture.passes import merged, passes_of, places, stack_order
from loopscope.capture.promise import promised_calls
from loopscope.capture.spec import CapturePlan
from loopscope.trace import TraceMeta, VisitSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """What is known of a block before it is called."""

    calls: int | None = 1
    """Calls in one forward that are promised; None where nobody knows."""
    layer: int | None = None
    """Physical number of the layer."""
    num_experts: int = 0
    """E of its router; 0 where it is dense."""
    top_k: int = 0
    """k of its router."""


class VisitPlaces:
    """The coordinates of a model's visits, forward after forward.

    A block that is called several times is part of the loop, as is what is promised to be, and what is called between
    such calls; what comes before the first of them is the head, what comes behind the last of them the tail. Once part
    of the loop, a block stays so: in a step of one pass it is where it is in a step of four. Where no block is looped,
    all are one pass of a loop, and `layer_idx` is the layer's physical number.

    A visit that is promised keeps its promised position also where others are left out; what is called in another order
    or more often than promised is numbered as it comes.

    Args:
        blocks: name → facts, in the order in which they are said to run.
    """

    def __init__(self, blocks: Mapping[str, BlockFacts]) -> None:
        self._blocks = dict(blocks)
        self._line = list(blocks)
        """Every block in the order in which they run, where none is looped."""
        self._stack = [name for name, facts in blocks.items() if facts.calls is None or facts.calls > 1]
        self._promised = promised_calls({name: facts.calls for name, facts in blocks.items()})

    @classmethod
    def of_plan(cls, plan: CapturePlan) -> VisitPlaces:
        """Those of a plan's blocks."""
        return cls({name: _facts(plan, name) for name in plan.blocks()})

    def visits(
        self, calls: Sequence[str], is_routed: Callable[[int], bool] = lambda call: True
    ) -> list[VisitSpec]:
        """The visits of one forward.

        Args:
            calls: block names, one per call that ended well, in execution order.
            is_routed: the number of a call → False where the block's router was not called in it.
        """
        self._learn(calls)
        found = self._numbered(calls)
        promised = self._promised_positions(_num_passes(found))
        wanted = [promised.get(_address(*each)) for each in zip(calls, found, strict=True)]
        aligned = [position for position in wanted if position is not None]
        if len(aligned) == len(found) and all(a < b for a, b in pairwise(aligned)):
            found = [replace(v, unrolled_pos=p) for v, p in zip(found, aligned, strict=True)]
        return [
            visit if is_routed(number) else replace(visit, num_experts=0, top_k=0)
            for number, visit in enumerate(found)
        ]

    def expected(self) -> tuple[VisitSpec, ...]:
        """The visits that are promised; none where a block promises no number of calls."""
        return tuple(self._numbered(self._promised or ()))

    def meta(self, visits: Sequence[VisitSpec]) -> TraceMeta:
        """The TraceMeta of a forward."""
        facts = self._blocks.values()
        num_experts, top_k = max(((each.num_experts, each.top_k) for each in facts), default=(0, 0))
        layers = [visit.layer_idx for visit in visits if visit.block == "loop"]
        return TraceMeta(
            num_stacks=max(_num_passes(visits), 1),
            num_layers_in_stack=len(self._stack) or 1 + max(layers, default=0),
            num_experts=num_experts,
            num_active=top_k,
        )

    def promised_meta(self) -> TraceMeta | None:
        """The TraceMeta of a forward that keeps the promise; None where none is made."""
        return None if self._promised is None else self.meta(self.expected())

    def _learn(self, calls: Sequence[str]) -> None:
        """What is looped and in which order the stack runs, from a forward."""
        counts = Counter(calls)
        looped = {*self._stack, *(name for name, count in counts.items() if count > 1)}
        inside = [pos for pos, name in enumerate(calls) if name in looped]
        if inside:
            section = calls[inside[0] : inside[-1] + 1]
            new = [name for name in self._blocks if name in section and name not in self._stack]
            self._stack = stack_order(section, merged(self._stack, new, list(self._blocks)))
        elif not self._stack:
            self._line = stack_order(calls, self._line)
        if self._promised is not None and counts == Counter(self._promised):
            self._promised = list(calls)  # as often as promised: nobody said in which order

    def _numbered(self, calls: Sequence[str]) -> list[VisitSpec]:
        """Visits with positions that count the calls."""
        order = places(self._stack)
        inside = [pos for pos, name in enumerate(calls) if name in order]
        if not self._stack:
            return [self._visit(name, pos, "loop", 0, self._number(name)) for pos, name in enumerate(calls)]
        first, last = (inside[0], inside[-1]) if inside else self._between(calls)
        passes = iter(passes_of(calls[first : last + 1], order))
        return [
            self._visit(name, pos, "loop", next(passes), order[name])
            if first <= pos <= last
            else self._visit(name, pos, "head" if pos < first else "tail", 0, 0)
            for pos, name in enumerate(calls)
        ]

    def _between(self, calls: Sequence[str]) -> tuple[int, int]:
        """Where a loop that made no pass would be: behind the blocks that come before its stack."""
        names = list(self._blocks)
        start = min(names.index(name) for name in self._stack)
        first = sum(names.index(name) < start for name in calls)
        return first, first - 1

    def _number(self, name: str) -> int:
        layer = self._blocks[name].layer
        return self._line.index(name) if layer is None else layer

    def _visit(self, name: str, pos: int, block: Any, loop_step: int, layer_idx: int) -> VisitSpec:
        facts = self._blocks[name]
        return VisitSpec(
            block=block, unrolled_pos=pos, loop_step=loop_step, layer_idx=layer_idx,
            num_experts=facts.num_experts, top_k=facts.top_k,
        )  # fmt: skip

    def _promised_positions(self, num_passes: int) -> dict[tuple[str, str, int], int]:
        """Address → position, in a forward of `num_passes` passes; the tail moves up where there are fewer."""
        calls = self._promised or []
        found: dict[tuple[str, str, int], int] = {}
        position = 0
        for name, visit in zip(calls, self._numbered(calls), strict=True):
            if visit.block == "loop" and visit.loop_step >= num_passes:
                continue
            found[_address(name, visit)] = position
            position += 1
        return found


def visits_of(calls: Sequence[str], layers: Mapping[str, int]) -> list[VisitSpec]:
    """The visits of one forward of dense blocks of which nothing is promised but their physical numbers.

    Args:
        calls: module names, one per call, in execution order.
        layers: module name → physical number, for modules that have one.
    """
    return VisitPlaces({name: BlockFacts(layer=layers.get(name)) for name in dict.fromkeys(calls)}).visits(
        calls
    )


def _facts(plan: CapturePlan, name: str) -> BlockFacts:
    routing = plan.routing_of(name)
    num_experts, top_k = (0, 0) if routing is None else (routing.num_experts, routing.top_k)
    spec = plan[name]
    return BlockFacts(calls=spec.calls, layer=spec.layer, num_experts=num_experts, top_k=top_k)


def _address(name: str, visit: VisitSpec) -> tuple[str, str, int]:
    return name, visit.block, visit.loop_step


def _num_passes(visits: Sequence[VisitSpec]) -> int:
    return max((1 + visit.loop_step for visit in visits if visit.block == "loop"), default=0)
