"""The decoder's layers: the items of the module lists that hold most of what routes."""

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn


def layers_around(modules: Mapping[str, nn.Module], routers: Iterable[str]) -> dict[str, list[str]]:
    """Layer → what of `routers` lies in it; every item of a list that holds a router, in the model's order.

    Of the lists around a router, the one most of whose items hold routers is the list of layers; the outermost, where
    several do.

    Args:
        modules: every module by name.
        routers: names of the routers, or of the modules that hold them.
    """
    names = list(routers)
    items = {name: _items_around(name, modules) for name in names}
    holding: Counter[str] = Counter()
    for item in {item for around in items.values() for item in around}:
        holding[item.rpartition(".")[0]] += 1
    layer_of = {
        name: max(around, key=lambda item: (holding[item.rpartition(".")[0]], -item.count(".")))
        for name, around in items.items()
        if around
    }
    lists = {layer.rpartition(".")[0] for layer in layer_of.values()}
    found: dict[str, list[str]] = {
        name: [] for name in modules if name.rpartition(".")[0] in lists and name.rpartition(".")[2].isdigit()
    }
    for name, layer in layer_of.items():
        found[layer].append(name)
    return found


def _items_around(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    found = []
    while name:
        parent = name.rpartition(".")[0]
        if (
            isinstance(modules.get(parent), (nn.ModuleList, nn.Sequential))
            and name.rpartition(".")[2].isdigit()
        ):
            found.append(name)
        name = parent
    return found
