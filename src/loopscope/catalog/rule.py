"""What an alert rule is: its bounds, the function that judges rows, its window, and what people read of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from loopscope.catalog.row_batch import Flags, Floats, Ints, RowBatch, Subjects
from loopscope.errors import ConfigError

_COUNTS = {"warmup_steps": 0, "sustain": 1, "again_after": 1}
"""Integer settings → smallest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleBounds:
    """Bounds of the rules. The defaults do not depend on the model's size and lie above sampling noise."""

    warmup_steps: int = 1000
    """Steps at the start that are not judged: a router needs them to settle. Arithmetic (closure) and lost
    data (coverage, non-finite values, dropped rows) are judged from the first step on."""
    sustain: int = 20
    """Traces in a row that must break a bound before it is an alert."""
    clear_at: float = 0.8
    """An alert ends where the value is back at this share of its bound."""
    again_after: int = 1000
    """An event that is told at once is told again where none like it came for this many steps."""
    maxvio_share: float = 0.3
    """MaxVio, as a share of its maximum E/k − 1."""
    maxvio_critical: float = 0.6
    """The same, critical."""
    maxvio_noise: float = 3.0
    """MaxVio, in units of sqrt(2 ln E · E/(kT)): what balanced routing of T tokens shows by chance."""
    dead_expected: float = 100.0
    """Assignments that a dead expert should have had over the window: chance e^-100."""
    load_entropy: float = 0.8
    """load_entropy_ratio."""
    load_entropy_critical: float = 0.5
    """The same, critical."""
    collapse: float = 0.05
    """token_entropy_ratio, and mutual_information in units of ln E."""
    z_above: float = 10.0
    """|z_mean| above ln E: bfloat16 steps by 0.25 at 50."""
    logit_abs_max: float = 50.0
    """Largest router logit."""
    closure: float = 1e-4
    """|closure_error| in units of max(1, |total_loss|)."""
    token_correlation: float = 0.9
    """token_correlation at the last loop visit."""
    growth: float = 1.1
    """Growth at the last step_boundary."""
    relative_delta: float = 1.5
    """relative_delta there, in units of its best mean over `sustain` traces."""

    def __post_init__(self) -> None:
        for field in fields(RuleBounds):
            value, least = getattr(self, field.name), _COUNTS.get(field.name)
            if least is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ConfigError(f"{field.name} is {value!r}, expected an integer >= {least}")
            elif (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")
            ):
                raise ConfigError(f"{field.name} is {value!r}, expected a number above 0")
        if self.clear_at > 1:
            raise ConfigError(f"clear_at is {self.clear_at!r}, expected a share of the bound in (0, 1]")


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


Memory = dict[Any, Any]
"""What a rule remembers of earlier batches, as its own file says; empty before the first."""

Judge = Callable[[RowBatch, RuleBounds, Memory], Readings | None]
"""Readings of a batch; None where there is none. Any split of the rows into batches gives the same readings."""


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
