"""What was checked about a run, in words and numbers: the healthy as well as the sick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from loopscope.alerts import RULES, AlertSettings
from loopscope.analysis.health_findings import Findings
from loopscope.report import readings
from loopscope.report.look import Look
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    title: str
    rules: tuple[str, ...]
    chart: str
    bound: str
    """In the settings' words."""
    read: Callable[[Look, AlertSettings], Seen | None]
    missing: str
    warm: bool = True
    """False where it is judged from the first step on."""


def _of(name: str, read: Callable[[Look, AlertSettings], Seen | None] | None = None) -> _Kind:
    """The check of one rule over one table."""
    rule = RULES[name]
    assert rule.check is not None, name
    return _Kind(
        title=rule.check.title,
        rules=(name,),
        chart=rule.chart,
        bound=rule.check.bound,
        read=read or partial(readings.by_rule, name),
        missing=rule.check.missing,
        warm=rule.warmup,
    )


_KINDS = (
    _of("closure", readings.closure),
    _Kind(
        title="Every value is finite", rules=("nonfinite",), chart="counts", read=readings.finite, bound="none",
        missing="there are no rows", warm=False,
    ),
    _of("dead_expert", readings.dead),
    _of("load_entropy"),
    _of("maxvio"),
    _of("router_collapse"),
    _of("z"),
    _of("loop_growth"),
    _of("loop_delta", readings.movement),
    _of("token_correlation"),
    _Kind(
        title="Everything was measured", rules=("coverage", "dropped", "bad_input", "other"), chart="coverage",
        read=readings.measured, missing="nothing was traced", bound="every visit, no event", warm=False,
    ),
    _Kind(
        title="The run's files are whole", rules=("files",), chart="files", read=readings.files, missing="",
        bound="no problem", warm=False,
    ),
)  # fmt: skip


def checks(look: Look, found: Findings) -> list[Check]:
    """Every check with its state and value: losses, routing, loop, then the measurement itself."""
    return [_check(kind, kind.read(look, found.settings), found) for kind in _KINDS]


def _check(kind: _Kind, seen: Seen | None, found: Findings) -> Check:
    return Check(
        title=kind.title,
        state=_state(kind, seen, found),
        now=kind.missing if seen is None else seen.text,
        bound=kind.bound.format(**asdict(found.settings)),
        chart=kind.chart,
    )


def _state(kind: _Kind, seen: Seen | None, found: Findings) -> State:
    lasting = {f.severity for f in found.found if not f.over and f.rule in kind.rules}
    if lasting:
        return "critical" if "critical" in lasting else "warn"
    if any(f.rule in kind.rules for f in found.early):
        return "early"
    if seen is None or not seen.judged or all(name in found.settings.off for name in kind.rules):
        return "none"
    if kind.warm and found.young:
        return "young"
    return "near" if seen.excess > 1 else "ok"


def tally(listed: list[Check]) -> str:
    """All checks in one sentence, such as "9 of 12 checks are healthy, 1 critical, 2 not judged"."""
    counts = {state: sum(check.state == state for check in listed) for state in SIGNS}
    rest = [f"{count} {SIGNS[state][1]}" for state, count in counts.items() if count and state != "ok"]
    return ", ".join((f"{counts['ok']} of {len(listed)} checks healthy", *rest))
