"""The nearest right names, for the messages of wrong ones."""

import difflib
from collections.abc import Iterable, Sequence


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'a' or 'b'?`: up to three names of `known` that look most like `name`, else those that end alike,
    else the known names. Starts with a space."""
    names = sorted(known)
    if found := difflib.get_close_matches(name, names, cutoff=0.5) or [
        other for other in names if other.rpartition(".")[2] == name.rpartition(".")[2]
    ]:
        return " Did you mean " + " or ".join(repr(other) for other in found[:3]) + "?"
    return f" Known: {shortened([repr(other) for other in names])}." if names else ""


def shortened(names: Sequence[str]) -> str:
    """The first eight names, separated by commas."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
