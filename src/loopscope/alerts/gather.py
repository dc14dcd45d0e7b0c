"""From alerts to what is told: one notice per rule and severity, however many places broke it at once."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from loopscope.alerts.engine import Alert
from loopscope.alerts.notice import MOST_PLACES, AlertNotice
from loopscope.catalog.rule import Rule

_NAMED = 3


def notices(
    alerts: Iterable[Alert],
    step: int,
    rules: Mapping[str, Rule],
    *,
    run_id: str,
    run_name: str,
    attempt: int,
) -> list[AlertNotice]:
    """What is told of the alerts that one step gave."""
    groups: dict[tuple[str, str], list[Alert]] = {}
    for alert in alerts:
        groups.setdefault((alert.rule, alert.severity), []).append(alert)
    found = []
    for group in groups.values():
        group.sort(key=lambda alert: -alert.worst)
        worst, rule = group[0], rules[group[0].rule]
        names = tuple(alert.subject for alert in group)
        found.append(
            AlertNotice(
                run_id=run_id,
                run_name=run_name,
                attempt=attempt,
                step=step,
                rule=rule.name,
                severity=worst.severity,
                subject=in_words(names, len(names)),
                since=min(alert.since for alert in group),
                title=rule.title,
                text=worst.text if len(group) == 1 else f"at worst {worst.text} ({worst.subject})",
                why=f"bound: {rule.bound}; {rule.why.rstrip('.')}",
                places=names[:MOST_PLACES],
                num_places=len(names),
            )
        )
    return found


def merged(earlier: AlertNotice, later: AlertNotice) -> AlertNotice:
    """Two notices of one rule and severity as one. A place that both name counts once."""
    names = tuple(dict.fromkeys((*earlier.places, *later.places)))
    again = len(earlier.places) + len(later.places) - len(names)
    count = earlier.num_places + later.num_places - again
    newest = later.text if later.num_places > 1 else f"{later.text} ({later.subject})"
    return replace(
        later,
        text=f"newest {newest}",
        since=min(earlier.since, later.since),
        subject=in_words(names, count),
        places=names[:MOST_PLACES],
        num_places=count,
    )


def in_words(names: tuple[str, ...], count: int) -> str:
    """A place's name; of many, how many there are and the first three.

    >>> in_words(("head 0", "head 1", "tail 0", "tail 1"), 9)
    '9 places (head 0; head 1; tail 0; and 6 more)'
    """
    if count == 1:
        return names[0]
    shown = list(names[:_NAMED])
    if count > len(shown):
        shown.append(f"and {count - len(shown)} more")
    return f"{count} places ({'; '.join(shown)})"
