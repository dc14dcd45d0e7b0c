"""What a new attempt knows of the run before it: the rules' state, and what people were told."""

from dataclasses import dataclass

from loopscope.alerts.engine import Alert, AlertEngine

Told = tuple[str, str, int, str]
"""(rule, subject, since, severity) of an alert: by which it is known again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayState:
    """The run before an attempt's first step."""

    engine: AlertEngine
    """As a replay of the live rows leaves it."""
    told: frozenset[Told] = frozenset()
    """Alerts of any attempt, rolled back or not: whoever is told of them is told already."""
    untold: tuple[Alert, ...] = ()
    """Alerts that last and are in no live row: the last attempt died before it could say so, or had no rules on."""


def key_of(alert: Alert) -> Told:
    """By which an alert is known again."""
    return (alert.rule, alert.subject, alert.since, alert.severity)
