"""What a new attempt knows of the run before it: the rules' state, and what people were told."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from loopscope.alerts.engine import Alert, AlertEngine
from loopscope.alerts.table import RULES

Told = tuple[str, str, int, str]
"""(rule, subject, since, severity) of an alert."""

_WORDS = re.compile(r"^(?P<rule>\w+): .*?\. (?P<subject>.*?), since step (?P<since>\d+): ", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayState:
    """The run before an attempt's first step."""

    engine: AlertEngine
    """As a replay of the live rows leaves it."""
    told: frozenset[Told] = frozenset()
    """Alerts of any attempt, rolled back or not: whoever is told of them is told already."""
    untold: tuple[Alert, ...] = field(default=())
    """Alerts that last and are in no live row: the last attempt died before it could say so, or had no rules on."""


def state_of(engine: AlertEngine, rows: Iterable[tuple[str, str, bool]]) -> ReplayState:
    """Put the state and the run's `alert` rows together.

    Args:
        engine: as a replay left it.
        rows: (detail, severity, is it live) of every such row.
    """
    told: set[Told] = set()
    live: set[Told] = set()
    for detail, severity, is_live in rows:
        found = _WORDS.match(detail)
        if found is None:
            continue
        key = (found["rule"], found["subject"], int(found["since"]))
        # Who heard that it is critical need not hear that it is a warning.
        keys = {(*key, severity), (*key, "warn")}
        told |= keys
        live |= keys if is_live else set()
    untold = tuple(
        alert for alert in engine.active if not RULES[alert.rule].at_once and key_of(alert) not in live
    )
    return ReplayState(engine=engine, told=frozenset(told), untold=untold)


def words_of(alert: Alert) -> str:
    """The text of its health row."""
    return f"{alert.rule}: {RULES[alert.rule].title}. {alert.subject}, since step {alert.since}: {alert.text}"


def key_of(alert: Alert) -> Told:
    """By which it is known again."""
    return (alert.rule, alert.subject, alert.since, alert.severity)
