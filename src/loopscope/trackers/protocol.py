"""What a tracker is given, and what it must do with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from loopscope.alerts import AlertNotice

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerStart:
    """What a tracker knows when it starts."""

    run_id: str
    """UUIDv7 of the run."""
    run_name: str
    """Name for people."""
    attempt: int
    """Number of the attempt, from 1."""
    first_step: int
    """First step that this attempt trains; above 1 it continues a run, or replaces its last steps."""
    out: Path
    """Folder of the run."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The run's configuration, as plain data."""
    version: str = ""
    """loopscope's version."""
    shared: Any = None
    """What the trainer started already and the tracker is to write into; None where it starts its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitTable:
    """Per-visit values of one traced step; a value that does not exist is None."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """By depth, at most `visits.MAX_ROWS`."""
    left_out: int = 0
    """Visits that were thinned out."""

    def column(self, name: str) -> list[float]:
        """The numbers of one column; what is missing is left out."""
        at = self.columns.index(name)
        return [float(row[at]) for row in self.rows if isinstance(row[at], int | float)]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """What is known of one step. A step may come twice: what arrives late (a probe) comes by itself."""

    step: int
    """Optimizer step; it goes back where a run was rolled back."""
    scalars: Mapping[str, float]
    """Key → value, with the keys that the budget admitted."""
    visits: VisitTable | None = None
    """At traced steps."""
    show_table: bool = False
    """True where the table itself is to be shown; at other traced steps its columns are for distributions."""


class Tracker(Protocol):
    """Takes a run's values. It may raise: the guard around it counts, tells, and switches it off."""

    where: str
    """Where people find it: an address or a folder."""
    own_keys: tuple[str, ...]
    """Keys that it makes beside the scalars (tables, distributions, its step); they count in the budget."""

    def log(self, values: StepValues) -> None:
        """Take the values of one step."""
        ...

    def alert(self, notice: AlertNotice) -> None:
        """Tell people of an alert. May be called from another thread, never while another call is under way."""
        ...

    def close(self) -> None:
        """Hand over what is left. What the trainer started stays open."""
        ...


def alert_text(notice: AlertNotice) -> str:
    """What an alert says below its title: run and step, where and how far, and why the bound is where it is."""
    return (
        f"{notice.run_name}, attempt {notice.attempt}, step {notice.step} (rule {notice.rule})\n\n"
        f"{notice.subject}, since step {notice.since}: {notice.text}\n\n{notice.why}\n\nrun_id {notice.run_id}"
    )
