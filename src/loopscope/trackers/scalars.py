"""Rows → the scalars of a step. Their number does not depend on the model's depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loopscope.catalog.gauge import scalars_of
from loopscope.catalog.registry import GAUGES

Row = Mapping[str, Any]

CORE_KEYS = (*GAUGES, "health/events", "health/dropped", "loopscope/attempt", "loopscope/tokens_seen")
"""Every scalar but those of the user's own metrics; each has its place in a tracker's budget from the start."""

CUSTOM = "custom:"
"""Prefix of the health events that hold the user's own metrics, one per visit."""


def of_step(tables: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Every gauge of the catalogue over one step's rows, and the user's own metrics; a null one is left out.

    Args:
        tables: table → the rows of the step that speak for the run.
    """
    return scalars_of(GAUGES.values(), tables) | _of_custom(tables.get("health", ()))


def _of_custom(rows: Iterable[Row]) -> dict[str, float]:
    """`custom/NAME_mean` and `_max` of the user's own metrics over visits."""
    own: dict[str, list[float]] = {}
    for row in rows:
        if row["event"].startswith(CUSTOM) and row.get("value") is not None:
            own.setdefault(row["event"].removeprefix(CUSTOM), []).append(row["value"])
    return {
        f"custom/{name}_{how}": value
        for name, values in own.items()
        for how, value in (("mean", sum(values) / len(values)), ("max", max(values)))
    }
