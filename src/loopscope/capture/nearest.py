"""The nearest right names, for the messages of wrong ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Names of `known` that look most like `name`, best first; those that end alike where none look alike."""
    names = list(known)
    found = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    if found:
        return found
    last = name.rpartition(".")[2]
    return [other for other in names if other.rpartition(".")[2] == last][:limit]


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'a' or 'b'?`, or the known names where nothing is near; starts with a space."""
    names = sorted(known)
    found = nearest(name, names)
    if found:
        return " Did you mean " + " or ".join(repr(other) for other in found) + "?"
    if not names:
        return ""
    shown = ", ".join(repr(other) for other in names[:8])
    return f" Known: {shown}{', ...' if len(names) > 8 else ''}."
