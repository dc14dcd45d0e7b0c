"""From calls in execution order to coordinates of depth: head, loop, tail."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from loopscope.capture.spec import CapturePlan
from loopscope.trace import TraceMeta, VisitSpec

_NO_SIZES: Mapping[str, tuple[int, int]] = {}


def visits_of(
    calls: Sequence[str], layers: Mapping[str, int], sizes: Mapping[str, tuple[int, int]] = _NO_SIZES
) -> list[VisitSpec]:
    """The visits of calls that are given by module name in execution order.

    A module that is called several times is part of the loop, once per pass; what is called once before the first
    of them is the head, once behind the last of them the tail. Where every module is called once, all of them are
    one pass of a loop, and `layer_idx` is the layer's physical number.

    Args:
        calls: module names, one per call.
        layers: module name → physical number, for modules that have one.
        sizes: module name → (E, k), for modules with a router.
    """
    looped = {name for name, count in Counter(calls).items() if count > 1}
    inside = [pos for pos, name in enumerate(calls) if name in looped] or range(len(calls) or 1)
    first, last = inside[0], inside[-1]
    stack = {name: index for index, name in enumerate(dict.fromkeys(calls[first : last + 1]))}
    if not looped:
        stack |= {name: layers[name] for name in calls if name in layers}
    seen: Counter[str] = Counter()
    found = []
    for pos, name in enumerate(calls):
        block: Any = "head" if pos < first else "tail" if pos > last else "loop"
        num_experts, top_k = sizes.get(name, (0, 0))
        found.append(
            VisitSpec(
                block=block,
                unrolled_pos=pos,
                loop_step=seen[name] if block == "loop" else 0,
                layer_idx=stack[name] if block == "loop" else 0,
                num_experts=num_experts,
                top_k=top_k,
            )
        )
        seen[name] += 1
    return found


def plan_visits(plan: CapturePlan, calls: Sequence[str]) -> list[VisitSpec]:
    """The visits of calls of a plan's blocks."""
    blocks = plan.blocks()
    sizes = {
        name: (part.routing.num_experts, part.routing.top_k)
        for name in blocks
        for part in reversed(plan.parts_of(name).values())
        if part.routing is not None
    }
    layers = {name: spec.layer for name, spec in blocks.items() if spec.layer is not None}
    return visits_of(calls, layers, sizes)


def meta_of(visits: Sequence[VisitSpec]) -> TraceMeta:
    """The TraceMeta of one forward, from its own visits."""
    loop = [visit for visit in visits if visit.block == "loop"]
    num_experts, top_k = max(((visit.num_experts, visit.top_k) for visit in visits), default=(0, 0))
    return TraceMeta(
        num_stacks=1 + max((visit.loop_step for visit in loop), default=0),
        num_layers_in_stack=1 + max((visit.layer_idx for visit in loop), default=0),
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
    stacks = groupby(blocks, key=lambda item: item[1])
    return [name for calls, stack in stacks for name, _ in list(stack) * (calls or 0)]


def expected_visits(plan: CapturePlan) -> tuple[VisitSpec, ...]:
    """The visits that a plan promises; empty where it promises no number of calls."""
    return tuple(plan_visits(plan, promised_calls(plan) or ()))


def promised_meta(plan: CapturePlan) -> TraceMeta | None:
    """The TraceMeta of a forward that keeps the plan's promise; None where it promises no number of calls."""
    calls = promised_calls(plan)
    return None if calls is None else meta_of(plan_visits(plan, calls))
