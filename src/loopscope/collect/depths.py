"""Microbatches of one step that ran different visits: which of them are the same visit of the model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from loopscope.collect.pairs import Key, Pair
from loopscope.collect.partials import Partial
from loopscope.trace import VisitSpec

Visits = tuple[VisitSpec, ...]
_Address = tuple[str, int, int]


def merge_depths(groups: Mapping[Visits, Mapping[Key, Partial]]) -> dict[Key, Partial]:
    """The partial vectors of all microbatches together, under one set of positions.

    A visit of the loop is the same in all of them where pass and layer are, one of the head or the tail where its place
    in it is. Positions are those of the microbatch of most passes: the tail of a shorter one moves up to it. Where
    they contradict each other, visits are numbered in the order of head, passes and tail.

    Args:
        groups: visits of a microbatch → what those that ran exactly these have; not empty.
    """
    positions = _positions(groups)
    found: dict[Key, Partial] = {}
    for visits, partials in groups.items():
        at = {visit.unrolled_pos: positions[address] for visit, address in _addresses(visits).items()}
        for key, new in partials.items():
            moved = _moved(key, at.__getitem__)
            found[moved] = new if (known := found.get(moved)) is None else _together(known, new)
    return found


def _positions(groups: Mapping[Visits, object]) -> dict[_Address, int]:
    found: dict[_Address, int] = {}
    contradict = False
    for visits in groups:
        for visit, address in _addresses(visits).items():
            known = found.setdefault(address, visit.unrolled_pos)
            contradict |= known != visit.unrolled_pos and visit.block != "tail"
            found[address] = max(known, visit.unrolled_pos)
    order = sorted(found)
    rising = [found[address] for address in order]
    if contradict or any(a >= b for a, b in pairwise(rising)):
        return {address: position for position, address in enumerate(order)}
    return found


def _addresses(visits: Visits) -> dict[VisitSpec, _Address]:
    """Visit → what it is, whatever the depth: sorts in execution order."""
    tail = min((visit.unrolled_pos for visit in visits if visit.block == "tail"), default=0)
    return {
        visit: ("1", visit.loop_step, visit.layer_idx)
        if visit.block == "loop"
        else ("0", visit.unrolled_pos, 0)
        if visit.block == "head"
        else ("2", visit.unrolled_pos - tail, 0)
        for visit in visits
    }


def _moved(key: Key, at: Callable[[int], int]) -> Key:
    if isinstance(key, VisitSpec):
        return replace(key, unrolled_pos=at(key.unrolled_pos))
    return Pair(
        kind=key.kind,
        source=replace(key.source, unrolled_pos=at(key.source.unrolled_pos)),
        target=replace(key.target, unrolled_pos=at(key.target.unrolled_pos)),
        before=None if key.before is None else at(key.before),
    )


def _together(known: Partial, new: Partial) -> Partial:
    times = known.times_seen + new.times_seen
    if known.reduced is None or new.reduced is None:
        failed = known if known.reduced is None else new
        return replace(failed, times_seen=times)
    if known.layout != new.layout:
        failure = (
            "its number of experts or of choices changed within a step; expected one for all microbatches"
        )
        return Partial(times_seen=times, failure=failure)
    return replace(known, reduced=known.reduced.merged(new.reduced), times_seen=times)
