"""What an alert rule is: the function that judges rows, its window, and what people read of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from loopscope.catalog.row_batch import Flags, Floats, Ints, RowBatch, Subjects
from loopscope.catalog.rule_bounds import RuleBounds

Window = Literal["sustain", "own", "once"]
"""`sustain`: so many rows in a row must break the bound; `own`: the rule itself looks back over the window, and one
reading is enough; `once`: one row is enough, and there is no end."""


class Readings(NamedTuple):
    """A rule's look at a batch: the value in units of its bound, above 1 where the bound is broken.

    For a bound that the value must not fall below it is the shortfall that is compared, so that "back at 80% of the
    bound" means the same everywhere.
    """

    row: Ints
    """[n] the row of the batch that each is about, in the order of the steps."""
    value: Floats
    """[n]"""
    excess: Floats
    """[n] value over bound; NaN where the rule cannot judge."""
    subjects: Callable[[], Subjects]
    """Visits or layers, of each [n]; asked for where some reading matters alone."""
    text: Callable[[int], str]
    """Value and bound of the i-th, for people."""
    now: Callable[[int], str] = str
    """The i-th as the report's check says it."""
    critical: Flags | None = None
    """[n] whether it is worse than a warning; None: none is."""
    since: Ints | None = None
    """[n] the step at which what was found began, where the rule looks back itself; None: at the row's own."""


Judge = Callable[[RowBatch, RuleBounds, dict[Any, Any]], Readings | None]
"""Readings of a batch; None where there is none. The last argument is what the rule remembers of earlier batches: any
split of the rows into batches gives the same readings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """How a rule judges the rows of one table."""

    table: str
    columns: tuple[str, ...]
    """What it reads, besides `step`."""
    judge: Judge


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleCheck:
    """The line of the report's first screen that says how a rule stands."""

    title: str
    """What it means that the bound is kept."""
    bound: str
    """The bound in few words, with the numbers of the settings."""
    missing: str
    """Said where there is no value."""
    unjudged: str = ""
    """Said of a value that the rule cannot judge; empty: as if there were none."""
    chart: str = ""
    """Identifier of the chart that shows it; empty: the rule's."""
    also: tuple[str, ...] = ()
    """Rules that have no line of their own and are told of in this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """An alert rule."""

    name: str
    title: str
    """What an alert of this rule means, as a headline."""
    bound: str
    """The bound, in the notation of the metrics' documentation, with the numbers of the settings in force."""
    why: str
    """Why the bound is where it is."""
    chart: str
    """Identifier of the chart that shows it."""
    judgements: tuple[Judgement, ...] = ()
    """One per table; none where no row says it."""
    window: Window = "sustain"
    warmup: bool = True
    """True where the steps of the warm-up are not judged."""
    check: RuleCheck | None = None
    """None where the line of another rule tells of it."""

    @property
    def at_once(self) -> bool:
        """True where one row is enough: no warm-up, no window, no end."""
        return self.window == "once"

    def at(self, bounds: RuleBounds) -> Rule:
        """The rule with the bounds in force in its words."""
        numbers = asdict(bounds)
        return replace(self, bound=self.bound.format(**numbers), why=self.why.format(**numbers))


def number(value: float) -> str:
    """A value for people, "unknown" where there is none."""
    return "unknown" if np.isnan(value) else f"{value:.3g}"
