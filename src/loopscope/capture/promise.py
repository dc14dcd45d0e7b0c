"""In which order the blocks of a plan are expected to be called, from how often each is promised to be."""

from collections.abc import Mapping
from itertools import groupby


def promised_calls(calls: Mapping[str, int | None]) -> list[str] | None:
    """Block names in the order in which they are promised to be called; None where one promises no number.

    Neighbours that promise the same number > 1 are one stack. Where a stack is called a whole number of times as often
    as its neighbour, both are cycles within cycles: L 4 times and H twice is L L H L L H. Nobody said so, and the order
    that is first seen counts.

    Args:
        calls: block → calls in one forward, in the order in which blocks run.
    """
    counts = {name: count for name, count in calls.items() if count is not None}
    if len(counts) < len(calls):
        return None
    looped = (list(part) for is_loop, part in groupby(counts, key=lambda name: counts[name] > 1) if is_loop)
    cycles = {part[0]: _cycles({name: counts[name] for name in part}) for part in looped}
    found: list[str] = []
    for name, count in counts.items():
        found += cycles.get(name, [name] if count == 1 else [])
    return found


def _cycles(counts: Mapping[str, int]) -> list[str]:
    outer = min(counts.values())
    if all(count == outer for count in counts.values()):
        return list(counts) * outer
    if any(count % outer for count in counts.values()):
        stacks = groupby(counts, key=lambda name: counts[name])
        return [name for count, stack in stacks for name in list(stack) * count]
    cycle: list[str] = []
    for is_inner, part in groupby(counts, key=lambda name: counts[name] > outer):
        names = list(part)
        cycle += _cycles({name: counts[name] // outer for name in names}) if is_inner else names
    return cycle * outer
