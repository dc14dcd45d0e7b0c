"""What was checked about a run, in words and numbers: the healthy as well as the sick."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from loopscope.alerts import RULES, AlertSettings, Rule
from loopscope.analysis.health_findings import Findings
from loopscope.report import readings
from loopscope.report.queries import RunQueries
from loopscope.report.readings import Seen

State = Literal["critical", "warn", "early", "near", "ok", "young", "none"]

SIGNS: Mapping[State, tuple[str, str]] = {
    "critical": ("✕", "critical"),
    "warn": ("!", "warning"),
    "early": ("?", "early sign"),
    "near": ("~", "beyond its bound, but not for long"),
    "ok": ("✓", "healthy"),
    "young": ("…", "too young to judge"),
    "none": ("–", "not judged"),
}
"""State → the sign before a check and its meaning in words: colour alone says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the first screen."""

    title: str
    state: State
    now: str
    """The value furthest out, and where; or why there is none."""
    bound: str
    """What it may be."""
    chart: str
    """Identifier of the chart or table that shows it."""

    @property
    def sign(self) -> str:
        """One character."""
        return SIGNS[self.state][0]

    @property
    def meaning(self) -> str:
        """The state in words."""
        return SIGNS[self.state][1]


_READ: Mapping[str, Callable[[RunQueries, AlertSettings], Seen | None]] = {
    "closure": readings.closure,
    "nonfinite": readings.finite,
    "dead_expert": readings.dead,
    "load_entropy": partial(readings.by_rule, "load_entropy"),
    "maxvio": partial(readings.by_rule, "maxvio"),
    "router_collapse": partial(readings.by_rule, "router_collapse"),
    "z": partial(readings.by_rule, "z"),
    "loop_growth": partial(readings.by_rule, "loop_growth"),
    "loop_delta": readings.movement,
    "token_correlation": partial(readings.by_rule, "token_correlation"),
    "coverage": readings.measured,
    "files": readings.files,
}
"""Rule → how its check is read off the rows, in the order of the screen: losses, routing, loop, the measurement."""


def checks(queries: RunQueries, found: Findings) -> list[Check]:
    """Every check with its state and value."""
    listed = []
    for name, read in _READ.items():
        rule, seen = RULES[name], read(queries, found.settings)
        if rule.check is not None:
            listed.append(
                Check(
                    title=rule.check.title,
                    state=_state(rule, (name, *rule.check.also), seen, found),
                    now=rule.check.missing if seen is None else seen.text,
                    bound=rule.check.bound.format(**asdict(found.settings)),
                    chart=rule.check.chart or rule.chart,
                )
            )
    return listed


def _state(rule: Rule, names: tuple[str, ...], seen: Seen | None, found: Findings) -> State:
    lasting = {f.severity for f in found.found if not f.over and f.rule in names}
    if lasting:
        return "critical" if "critical" in lasting else "warn"
    if any(f.rule in names for f in found.early):
        return "early"
    if seen is None or not seen.judged or all(name in found.settings.off for name in names):
        return "none"
    if rule.warmup and found.young:
        return "young"
    return "near" if seen.excess > 1 else "ok"


def tally(listed: list[Check]) -> str:
    """All checks in one sentence, such as "9 of 12 checks are healthy, 1 critical, 2 not judged"."""
    counts = {state: sum(check.state == state for check in listed) for state in SIGNS}
    rest = [f"{count} {SIGNS[state][1]}" for state, count in counts.items() if count and state != "ok"]
    return ", ".join((f"{counts['ok']} of {len(listed)} checks healthy", *rest))
