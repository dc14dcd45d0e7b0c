"""Passes through a stack of layers, from nothing but the order in which its layers were called."""

from collections.abc import Collection, Iterator, Mapping, Sequence


def passes_of(calls: Sequence[str], order: Mapping[str, int]) -> list[int]:
    """The pass of each call: a new one begins where the layer does not lie behind the one before it.

    Nested cycles need no rule of their own: L L H L L H is (L)(L H)(L)(L H).

    Args:
        calls: names, in execution order.
        order: name → place in the stack.

    >>> passes_of(["a", "c", "b", "c"], {"a": 0, "b": 1, "c": 2})
    [0, 0, 1, 1]
    """
    found: list[int] = []
    step, last = -1, len(order)
    for name in calls:
        step += order[name] <= last
        last = order[name]
        found.append(max(step, 0))
    return found


def stack_order(calls: Sequence[str], known: Sequence[str]) -> list[str]:
    """The layers of a stack in the order in which a pass runs them.

    Of all orders that are tried it is the one under which `calls` make up the fewest passes: a layer that is left out
    in some passes fits in where it belongs, and an order that was written down wrongly shows, since it takes the passes
    apart. Where several do, the known order stays.

    Args:
        calls: names of layers in execution order; each is in `known`.
        known: every layer of the stack in the order that is known so far.
    """
    best = list(known)
    fewest = _count(calls, best)
    for candidate in _candidates(calls, known):
        if (count := _count(calls, candidate)) < fewest:
            best, fewest = candidate, count
    return best


def _count(calls: Sequence[str], order: Sequence[str]) -> int:
    return 1 + max(passes_of(calls, places(order)), default=0)


def places(order: Sequence[str]) -> dict[str, int]:
    """Name → place."""
    return {name: place for place, name in enumerate(order)}


def _candidates(calls: Sequence[str], known: Sequence[str]) -> Iterator[list[str]]:
    yield _with_absent(list(dict.fromkeys(calls)), known)
    yield _with_absent(_by_precedence(calls, known), known)


def _by_precedence(calls: Sequence[str], known: Sequence[str]) -> list[str]:
    """Layers such that each lies behind those that ran before it in some pass, where a pass ends at a repetition."""
    behind: dict[str, set[str]] = {name: set() for name in calls}
    current: list[str] = []
    for name in calls:
        if name in current:
            current = []
        behind[name].update(current)
        current.append(name)
    order: list[str] = []
    left = [name for name in known if name in behind]
    while left:
        # A circle is broken at the layer that is known to come first.
        free = next((name for name in left if behind[name] <= set(order)), left[0])
        order.append(free)
        left.remove(free)
    return order


def _with_absent(order: list[str], known: Sequence[str]) -> list[str]:
    """The order with the layers that were not called, each behind the one that it is known to follow."""
    return merged(order, [name for name in known if name not in order], known)


def merged(order: Sequence[str], new: Collection[str], known: Sequence[str]) -> list[str]:
    """`order` with each of `new` behind the nearest layer before it in `known`."""
    found = list(order)
    for name in new:
        before = [other for other in known[: known.index(name)] if other in found]
        found.insert(found.index(before[-1]) + 1 if before else 0, name)
    return found
