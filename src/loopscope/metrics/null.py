"""Values that do not exist, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


class Masked:
    """A column some of whose rows do not exist.

    Args:
        values: [V] or [V, n]; what stands in rows that do not exist does not matter.
        nulls: (rows [V], why); the first that holds for a row counts.
    """

    __slots__ = ("nulls", "values")

    def __init__(self, values: NDArray[np.float64], *nulls: tuple[NDArray[np.bool_], Null]) -> None:
        self.values = values
        self.nulls = nulls


Found = NDArray[Any] | float | Null | Masked
"""A column as a metric gives it: an array [V] or [V, n], one number for all rows, a reason for all, or a mixture. What
is not finite becomes null."""
