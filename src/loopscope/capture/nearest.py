"""The nearest right names, for the messages of wrong ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'a' or 'b'?`: up to three names of `known` that look most like `name`, else those that end alike,
    else the known names. Starts with a space."""
    names = sorted(known)
    last = name.rpartition(".")[2]
    found = difflib.get_close_matches(name, names, cutoff=0.5) or [
        other for other in names if other.rpartition(".")[2] == last
    ]
    if found:
        return " Did you mean " + " or ".join(repr(other) for other in found[:3]) + "?"
    if not names:
        return ""
    shown = ", ".join(repr(other) for other in names[:8])
    return f" Known: {shown}{', ...' if len(names) > 8 else ''}."
