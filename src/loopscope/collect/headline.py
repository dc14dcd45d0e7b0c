"""The few scalars for the trainer's own log: the catalogue's headline gauges of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

from loopscope.catalog.gauge import scalars_of
from loopscope.catalog.registry import GAUGES

_HEADLINE = tuple(gauge for gauge in GAUGES.values() if gauge.headline)


def headline(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Key → value over the rows of one step; what is null, or has no row, is left out.

    Args:
        tables: table → its rows.
    """
    return scalars_of(_HEADLINE, tables)
