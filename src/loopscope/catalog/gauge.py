"""Gauges: the numbers that stand for one step of a table, and the one function that evaluates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Columns = Mapping[str, Sequence[Any] | NDArray[Any]]
"""Column name → a value per row, None or NaN where it is null."""

How = Literal["max", "min", "mean", "sum", "last", "place of max", "only"]
"""`max`, `min`, `mean` and `sum` skip rows that are null. `last` is the row with the largest `place` and `only` the one
row that there is: null where that row is null. `place of max` is where `max` was found, the deepest of equals."""

_WORDS: Mapping[How, str] = {
    "max": "largest {column}",
    "min": "smallest {column}",
    "mean": "mean {column}",
    "sum": "sum of {column}",
    "last": "{column} at the largest {place}",
    "place of max": "{place} of the largest {column}",
    "only": "{column}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauge:
    """One number per step: a column summed up over the rows that speak for the run."""

    key: str
    """Its name for trackers; with `_` for `/` the name of the Prometheus gauge and the JSON member."""
    table: str
    column: str
    how: How
    where: tuple[tuple[str, str], ...] = ()
    """(column, value): the rows that count."""
    place: str = ""
    """Coordinate of `last` and `place of max`: `unrolled_pos`, or `to_pos` of a transition."""
    headline: bool = False
    """True where it is one of the scalars of the trainer's own log."""
    title: str = ""
    """Heading of its chart where runs are compared; empty where it has none."""
    text: str = ""
    """How to read that chart."""
    axis: str = ""
    """Title of that chart's vertical axis."""

    @property
    def name(self) -> str:
        """The key as an identifier."""
        return self.key.replace("/", "_")

    @property
    def help(self) -> str:
        """What it is, in one line."""
        said = _WORDS[self.how].format(column=self.column, place=self.place)
        only = "".join(f", {column} {value}" for column, value in self.where)
        return f"{said} over the table {self.table} at its last step{only}"

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that it is evaluated from."""
        names = (self.column, *(name for name, _ in self.where), self.place)
        return tuple(dict.fromkeys(name for name in names if name))


class GaugeValues(NamedTuple):
    """A gauge at every step that has a row for it."""

    step: NDArray[np.int64]
    """[n], rising."""
    value: NDArray[np.float64]
    """[n]; NaN where it is null."""
    skipped: NDArray[np.int64]
    """[n]; rows that were null and left out."""


def evaluate_by_step(gauge: Gauge, columns: Columns) -> GaugeValues:
    """The gauge at each step.

    Args:
        gauge: what is wanted.
        columns: `gauge.needs`, and `step`, of the rows that speak for the run (`catalog.rows`), in any order.
    """
    step = np.asarray(columns["step"], dtype=np.int64)
    value = as_floats(columns[gauge.column])
    place = as_floats(columns[gauge.place]) if gauge.place else np.zeros(len(step))
    counts = np.ones(len(step), dtype=np.bool_)
    for name, wanted in gauge.where:
        counts &= np.asarray(columns[name], dtype=object) == wanted
    step, value, place = step[counts], value[counts], place[counts]
    known = ~np.isnan(value)
    ordered = np.where(known, value, -np.inf) if gauge.how in ("max", "place of max") else np.zeros(len(step))
    order = np.lexsort((place, ordered, step))
    step, value, place, known = step[order], value[order], place[order], known[order]
    begins = np.flatnonzero(np.r_[True, step[1:] != step[:-1]]) if len(step) else np.zeros(0, np.int64)
    ends = np.r_[begins[1:], len(step)] - 1 if len(step) else begins
    if not len(step):
        return GaugeValues(step, value, begins)
    num_known = np.add.reduceat(known.astype(np.int64), begins)
    skipped = np.diff(np.r_[begins, len(step)]) - num_known
    match gauge.how:
        case "only":
            found, skipped = value[begins], np.zeros_like(skipped)
        case "last":
            found, skipped = value[ends], np.zeros_like(skipped)
        case "max":
            found = value[ends]
        case "place of max":
            found = np.where(num_known > 0, place[ends], np.nan)
        case "min":
            lowest = np.minimum.reduceat(np.where(known, value, np.inf), begins)
            found = np.where(num_known > 0, lowest, np.nan)
        case "mean" | "sum":
            total = np.add.reduceat(np.where(known, value, 0.0), begins)
            share = np.maximum(num_known, 1) if gauge.how == "mean" else 1
            found = np.where(num_known > 0, total / share, np.nan)
    return GaugeValues(step[begins], found, skipped)


def evaluate(gauge: Gauge, columns: Columns) -> tuple[float | None, int]:
    """The gauge over the rows of one step: its value (None where it is null, or no row counts), and rows left out."""
    steps = np.zeros(len(columns[gauge.column]), dtype=np.int64)
    found = evaluate_by_step(gauge, {**columns, "step": steps})
    if not len(found.step) or np.isnan(found.value[0]):
        return None, int(found.skipped.sum())
    return float(found.value[0]), int(found.skipped[0])


def as_floats(values: Sequence[Any] | NDArray[Any]) -> NDArray[np.float64]:
    """A column as float64 [n]: NaN where it is null or, whoever wrote it, not finite."""
    found = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(found), found, np.nan)
