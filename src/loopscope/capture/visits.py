"""From calls in execution order to coordinates of depth: head, loop, tail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loopscope.capture.spec import CapturePlan
from loopscope.trace import TraceMeta, VisitSpec


@dataclass(frozen=True, slots=True)
class VisitPosition:
    """Where a call stands in the unrolled network."""

    block: str
    """"head", "loop" or "tail"."""
    unrolled_pos: int
    loop_step: int
    layer_idx: int


def visit_positions(calls: Sequence[str], layers: dict[str, int]) -> list[VisitPosition]:
    """Coordinates of calls that are given by module name in execution order.

    A module that is called several times is part of the loop, once per pass; what is called once before the first
    of them is the head, once behind the last of them the tail. Where every module is called once, all of them are
    one pass of a loop, and `layer_idx` is the layer's physical number.

    Args:
        calls: module names, one per call.
        layers: module name → physical number, for modules that have one.
    """
    counts = Counter(calls)
    looped = {name for name, count in counts.items() if count > 1}
    if not looped:
        ranks = {name: index for index, name in enumerate(dict.fromkeys(calls))}
        return [
            VisitPosition("loop", pos, 0, layers.get(name, ranks[name])) for pos, name in enumerate(calls)
        ]
    first = min(pos for pos, name in enumerate(calls) if name in looped)
    last = max(pos for pos, name in enumerate(calls) if name in looped)
    inside = list(dict.fromkeys(calls[first : last + 1]))
    stack = {name: index for index, name in enumerate(inside)}
    seen: Counter[str] = Counter()
    found = []
    for pos, name in enumerate(calls):
        if pos < first:
            found.append(VisitPosition("head", pos, 0, 0))
        elif pos > last:
            found.append(VisitPosition("tail", pos, 0, 0))
        else:
            found.append(VisitPosition("loop", pos, seen[name], stack[name]))
            seen[name] += 1
    return found


def meta_of(found: Iterable[VisitPosition], num_experts: int, top_k: int) -> TraceMeta:
    """The TraceMeta of one forward, from its own calls."""
    loop = [position for position in found if position.block == "loop"]
    return TraceMeta(
        num_stacks=1 + max((position.loop_step for position in loop), default=0),
        num_layers_in_stack=1 + max((position.layer_idx for position in loop), default=0),
        num_experts=num_experts,
        num_active=top_k,
    )


def promised_calls(plan: CapturePlan) -> list[str] | None:
    """Module names in the order they are promised to be called; None where a boundary promises no number.

    A run of neighbouring blocks that promise the same number of calls > 1 is taken as one stack.
    """
    blocks = [(name, spec.calls) for name, spec in plan.blocks().items()]
    if any(calls is None for _, calls in blocks):
        return None
    found: list[str] = []
    index = 0
    while index < len(blocks):
        calls = blocks[index][1]
        end = index + 1
        while end < len(blocks) and calls != 1 and blocks[end][1] == calls:
            end += 1
        found.extend([name for name, _ in blocks[index:end]] * (calls or 0))
        index = end
    return found


def layer_numbers(plan: CapturePlan) -> dict[str, int]:
    """Module name → physical number, where the plan has one."""
    return {name: spec.layer for name, spec in plan.blocks().items() if spec.layer is not None}


def size_of(plan: CapturePlan, block: str) -> tuple[int, int]:
    """(E, k) of a block; (0, 0) where it has no router."""
    for spec in plan.parts_of(block).values():
        if spec.routing is not None:
            return spec.routing.num_experts, spec.routing.top_k
    return 0, 0


def expected_visits(plan: CapturePlan) -> tuple[VisitSpec, ...]:
    """The visits that a plan promises; empty where it promises no number of calls."""
    calls = promised_calls(plan)
    if calls is None:
        return ()
    sizes = {name: size_of(plan, name) for name in plan.blocks()}
    return tuple(
        VisitSpec(
            block=position.block,  # type: ignore[arg-type]  # one of the three by construction
            unrolled_pos=position.unrolled_pos,
            loop_step=position.loop_step,
            layer_idx=position.layer_idx,
            num_experts=sizes[name][0],
            top_k=sizes[name][1],
        )
        for name, position in zip(calls, visit_positions(calls, layer_numbers(plan)), strict=True)
    )


def promised_meta(plan: CapturePlan) -> TraceMeta | None:
    """The TraceMeta of a forward that keeps the plan's promise; None where it promises no number of calls."""
    calls = promised_calls(plan)
    if calls is None:
        return None
    sizes = max((size_of(plan, name) for name in plan.blocks()), default=(0, 0))
    return meta_of(visit_positions(calls, layer_numbers(plan)), *sizes)
