"""Globs of a plan that cover some of a container's layers and not the others: `layers.?` of twelve layers."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from loopscope.capture.nearest import shortened


def glob_gaps(globs: Iterable[str], captured: Iterable[str], modules: Mapping[str, Any]) -> list[str]:
    """One line per glob that leaves out modules beside those it matches: the same class, another number.

    Args:
        globs: the plan's keys; those without a wildcard are passed over.
        captured: names of all boundaries of the resolved plan, by whichever key.
        modules: every module of the model by name.
    """
    known = set(captured)
    same = {id(modules[name]) for name in known if name in modules}
    found = []
    for key in globs:
        if not any(sign in key for sign in "*?["):
            continue
        matched = [name for name in modules if name in known and fnmatchcase(name, key)]
        kinds = {(place, type(modules[name])) for name in matched if (place := _place(name)) is not None}
        beside = [name for name, part in modules.items() if (_place(name), type(part)) in kinds]
        if missing := [name for name in beside if name not in known and id(modules[name]) not in same]:
            found.append(
                f"plan[{key!r}] covers {len(beside) - len(missing)} of {len(beside)} modules of one kind and leaves "
                f"out {shortened(missing)}. Widen the glob ('?' is one character, '*' any number), or name one by one "
                "those that you mean"
            )
    return found


def left_out(blocks: Iterable[str], modules: Mapping[str, Any]) -> frozenset[str]:
    """Modules beside the blocks, of their class and with another number, that are no blocks themselves.

    Args:
        blocks: names.
        modules: every module of the model by name.
    """
    known = set(blocks)
    same = {id(modules[name]) for name in known if name in modules}
    kinds = {(_place(name), type(modules[name])) for name in known if name in modules and _place(name)}
    return frozenset(
        name
        for name, part in modules.items()
        if (_place(name), type(part)) in kinds and name not in known and id(part) not in same
    )


def _place(name: str) -> tuple[str, str] | None:
    """What stands before and behind the last number in a name; None where there is none."""
    match = re.fullmatch(r"(.*?)(?<![^.])\d+((?:\.[^.]*[^.\d][^.]*)*)", name)
    return None if match is None else (match[1], match[2])
