"""Values that do not exist, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Null:
    """A value that does not exist, with the reason that goes into `null_reasons`."""

    reason: str
    """`not_applicable`, `absent:<why>`, `failed` or `nonfinite`."""


NOT_APPLICABLE = Null("not_applicable")
"""The metric does not exist for this shape or kind of row."""


def absent(why: str) -> Null:
    """The metric exists for this shape, but what it needs was not there."""
    return Null(f"absent:{why}")
