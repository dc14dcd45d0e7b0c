"""Gauges: the numbers that stand for one step of a table, and the one function that evaluates them."""

from collections.abc import Iterable, Mapping, Sequence
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
    def words(self) -> str:
        """What it is of a step's rows, in Markdown."""
        said = _WORDS[self.how].format(column=f"`{self.column}`", place=f"`{self.place}`")
        rows = "".join(f", {column} {value}" for column, value in self.where)
        return f"{said} of `{self.table}`{rows}"

    @property
    def help(self) -> str:
        """What it is at the end of a run, in one line."""
        return f"{self.words} at its last step".replace("`", "")

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that it is evaluated from."""
        names = (self.column, *(name for name, _ in self.where), self.place)
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def condition(self) -> str:
        """`where` as an SQL condition."""
        return equal_sql(self.where)


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
    value = np.asarray(columns[gauge.column], dtype=np.float64)
    place = as_floats(columns[gauge.place]) if gauge.place else value
    if gauge.where:
        counts = np.logical_and.reduce(
            [np.asarray(columns[name], dtype=object) == wanted for name, wanted in gauge.where]
        )
        step, value, place = step[counts], value[counts], place[counts]
    if not len(step):
        return GaugeValues(step, value, step)
    if gauge.place or (step[1:] < step[:-1]).any():
        size = np.where(np.isfinite(value), value, -np.inf) if gauge.how == "place of max" else step
        order = np.lexsort((place, size, step)) if gauge.place else np.argsort(step, kind="stable")
        step, value, place = step[order], value[order], place[order]
    known = np.isfinite(value)
    begins = np.r_[0, np.flatnonzero(step[1:] != step[:-1]) + 1]
    ends = np.r_[begins[1:], len(step)]
    num_known = np.add.reduceat(known, begins, dtype=np.int64)
    skipped = ends - begins - num_known
    match gauge.how:
        case "only" | "last":
            at = begins if gauge.how == "only" else ends - 1
            found, skipped = np.where(known[at], value[at], np.nan), np.zeros_like(skipped)
        case "place of max":
            found = place[ends - 1]
        case "max":
            found = np.maximum.reduceat(np.where(known, value, -np.inf), begins)
        case "min":
            found = np.minimum.reduceat(np.where(known, value, np.inf), begins)
        case "mean" | "sum":
            found = np.add.reduceat(np.where(known, value, 0.0), begins)
            if gauge.how == "mean":
                found /= np.maximum(num_known, 1)
    return GaugeValues(step[begins], np.where(num_known > 0, found, np.nan), skipped)


def evaluate(gauge: Gauge, columns: Columns) -> tuple[float | None, int]:
    """The gauge over the rows of one step: its value (None where it is null, or no row counts), and rows left out."""
    steps = np.zeros(len(columns[gauge.column]), dtype=np.int64)
    _, value, skipped = evaluate_by_step(gauge, {**columns, "step": steps})
    if not len(value):
        return None, 0
    return (None if np.isnan(value[0]) else float(value[0])), int(skipped[0])


def scalars_of(
    gauges: Iterable[Gauge], tables: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, float]:
    """Key → value of every gauge over the rows of one step; one that is null, or has no row, is left out.

    Args:
        gauges: what is wanted.
        tables: table → the rows of the step that speak for the run.
    """
    found = {}
    for gauge in gauges:
        if rows := tables.get(gauge.table):
            value, _ = evaluate(gauge, {name: [row.get(name) for row in rows] for name in gauge.needs})
            if value is not None:
                found[gauge.key] = value
    return found


def equal_sql(pairs: Iterable[tuple[str, str]]) -> str:
    """(column, value) pairs of the catalogue as an SQL condition; "true" where there is none."""
    return " and ".join(f"{column} = '{value}'" for column, value in pairs) or "true"


def as_floats(values: Sequence[Any] | NDArray[Any]) -> NDArray[np.float64]:
    """A column as float64 [n]: NaN where it is null or, whoever wrote it, not finite."""
    found = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(found), found, np.nan)
