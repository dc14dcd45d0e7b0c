"""Rows one by one → the values of whole steps. Their number does not depend on the model's depth."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loopscope.catalog.gauge import scalars_of
from loopscope.catalog.registry import GAUGES
from loopscope.trackers.protocol import StepValues
from loopscope.trackers.visits import NEEDED, TableSchedule, visit_table

Row = Mapping[str, Any]

CORE_KEYS = (*GAUGES, "health/events", "health/dropped", "loopscope/attempt", "loopscope/tokens_seen")
"""Every scalar but those of the user's own metrics; each has its place in a tracker's budget from the start."""

CUSTOM = "custom:"
"""Prefix of the health events that hold the user's own metrics, one per visit."""

_TRACE = ("router", "residual", "transition")
_ERRORS = ("error", "visit_failed")
_WAITING = 2  # A traced step's losses have come when the trace after it was written.


@dataclass(slots=True)
class _Step:
    tables: dict[str, list[Row]] = field(default_factory=dict)
    tokens: float | None = None


class StepAssembler:
    """Collects what belongs to one step, and gives it once.

    A step is whole when its loss row comes: trainers write the trace before it. Losses may come late, up to the
    next trace; a run without losses gives a step when the second trace after it begins. `finish` gives the rest.

    Args:
        scope: `aggregation_scope` of the rows that count; others (those of single ranks) are left out.
        attempt: number of the attempt.
    """

    def __init__(self, *, scope: str, attempt: int) -> None:
        self._scope, self._attempt = scope, attempt
        self._steps: dict[int, _Step] = {}
        self._traced: list[int] = []
        self._schedule = TableSchedule()
        self._unshown: StepValues | None = None
        self._events = self._errors = 0

    def see(self, table: str, row: Row, dropped: int = 0) -> Iterator[StepValues]:
        """Note one row; gives the steps that are whole now, in rising order.

        Args:
            table: the row's table.
            row: with its run-level keys.
            dropped: rows that could not be written so far.
        """
        if row.get("aggregation_scope", self._scope) != self._scope or table not in NEEDED:
            return
        step = row["step"]
        held = self._steps.setdefault(step, _Step())
        if row.get("tokens_seen") is not None:
            held.tokens = float(row["tokens_seen"])
        # Only what is needed: a row of a wide layer holds lists of hundreds of experts.
        held.tables.setdefault(table, []).append({name: row[name] for name in NEEDED[table] if name in row})
        if table == "loss":
            yield from self._up_to(step, dropped)
        elif table in _TRACE and step not in self._traced:
            self._traced.append(step)
            if len(self._traced) > _WAITING:
                yield from self._up_to(self._traced[0], dropped)
        elif table == "health":
            self._events += row.get("severity") in ("warn", "critical")
            self._errors += row.get("event") in _ERRORS

    def finish(self, dropped: int = 0) -> Iterator[StepValues]:
        """The steps that are left; the table of the last trace too, if it was not shown."""
        yield from self._up_to(max(self._steps, default=0), dropped)
        last, self._unshown = self._unshown, None
        if last is not None:
            yield StepValues(step=last.step, scalars={}, visits=last.visits, show_table=True)

    def _up_to(self, last: int, dropped: int) -> Iterator[StepValues]:
        self._traced = [step for step in self._traced if step > last]
        for step in sorted(step for step in self._steps if step <= last):
            yield from self._values(step, self._steps.pop(step), dropped)

    def _values(self, step: int, held: _Step, dropped: int) -> Iterator[StepValues]:
        scalars = of_step(held.tables)
        if not scalars:
            return
        if "health/coverage" in scalars or "loss" in held.tables:
            scalars |= {"health/events": float(self._events), "health/dropped": float(dropped + self._errors)}
        scalars["loopscope/attempt"] = float(self._attempt)
        if held.tokens is not None:
            scalars["loopscope/tokens_seen"] = held.tokens
        visits = visit_table(step, held.tables)
        shown = visits is not None and self._schedule.is_due(step)
        made = StepValues(step=step, scalars=scalars, visits=visits, show_table=shown)
        if visits is not None:
            self._unshown = None if shown else made
        yield made


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
