"""What was checked about a run, in words and numbers: the healthy as well as the sick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from loopscope.alerts import AlertSettings
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    title: str
    rules: tuple[str, ...]
    chart: str
    bound: str
    """In the settings' words."""
    read: Callable[[RunQueries, AlertSettings], Seen | None]
    missing: str
    warm: bool = True
    """False where it is judged from the first step on."""


_UNTRACED = "no router has a value"
_KINDS = (
    _Kind(
        title="The losses add up", rules=("closure",), chart="closure", read=readings.closure,
        bound="{closure:g} of the total", missing="no step has a closure error", warm=False,
    ),
    _Kind(
        title="Every value is finite", rules=("nonfinite",), chart="counts", read=readings.finite, bound="none",
        missing="there are no rows", warm=False,
    ),
    _Kind(
        title="Every expert is used", rules=("dead_expert",), chart="dead", read=readings.dead, missing=_UNTRACED,
        bound="none in any visit",
    ),
    _Kind(
        title="The load is spread over the experts", rules=("load_entropy",), chart="load_entropy",
        read=readings.load_entropy, missing=_UNTRACED, bound="at least {load_entropy:g}",
    ),
    _Kind(
        title="No expert is overloaded", rules=("maxvio",), chart="maxvio", read=readings.maxvio, missing=_UNTRACED,
        bound="at most {maxvio_share:.0%} of what is possible",
    ),
    _Kind(
        title="Routers tell tokens apart", rules=("router_collapse",), chart="token_entropy", read=readings.collapse,
        missing=_UNTRACED, bound="at least {collapse:g}, or as much mutual information",
    ),
    _Kind(
        title="Router logits stay small", rules=("z",), chart="z", read=readings.logits, missing=_UNTRACED,
        bound="{logit_abs_max:g}, and ln E + {z_above:g} either side of 0",
    ),
    _Kind(
        title="The state stops growing in the loop", rules=("loop_growth",), chart="growth", read=readings.growth,
        missing="no loop has a value", bound="at most {growth:g}, or falling",
    ),
    _Kind(
        title="The loop settles as it once did", rules=("loop_delta",), chart="relative_delta", read=readings.movement,
        missing="no whole window of a loop's traces yet", bound="at most {relative_delta:g} times its best",
    ),
    _Kind(
        title="Tokens stay different", rules=("token_correlation",), chart="token_correlation",
        read=readings.correlation, missing="no state of a loop has a value", bound="at most {token_correlation:g}",
    ),
    _Kind(
        title="Everything was measured", rules=("coverage", "dropped", "bad_input", "other"), chart="coverage",
        read=readings.measured, missing="nothing was traced", bound="every visit, no event", warm=False,
    ),
    _Kind(
        title="The run's files are whole", rules=("files",), chart="files", read=readings.files, missing="",
        bound="no problem", warm=False,
    ),
)  # fmt: skip


def checks(look: RunQueries, found: Findings) -> list[Check]:
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
