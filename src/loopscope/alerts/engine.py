"""Rows in the order of training, alerts out: beside the training and over a finished run alike."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from loopscope.catalog.alert_settings import AlertSettings
from loopscope.catalog.row_batch import RowBatch, relevant
from loopscope.catalog.rule import Readings, Rule
from loopscope.catalog.rule_registry import JUDGES

Severity = Literal["warn", "critical"]


@dataclass(slots=True)
class Alert:
    """A rule that was broken long enough, from its first broken row until it ended."""

    rule: str
    subject: str
    severity: Severity
    since: int
    """Step at which the bound was first broken; for a dead expert, its first trace without a token."""
    fired: int
    """Step at which that had lasted long enough."""
    last: int
    """Last step at which the bound was broken."""
    count: int
    """Rows that broke the bound."""
    text: str
    """Value and bound at the worst row."""
    worst: float
    """Excess of the worst row."""
    cleared: int | None = None
    """Step at which the value was back; None while it lasts."""


@dataclass(slots=True)
class _Streak:
    since: int
    last: int
    count: int = 0
    critical: int = 0
    worst: float = 0.0
    text: str = ""
    alert: Alert | None = None


@dataclass(slots=True)
class AlertEngine:
    """Judges rows as they come. Feed every table's rows in the order of their steps; tables may interleave.

    >>> engine = AlertEngine(AlertSettings(warmup_steps=0, sustain=2))
    >>> rows = [{"step": step, "closure_error": 0.5, "total_loss": 1.0} for step in (1, 2)]
    >>> fired = engine.observe_rows("loss", rows)
    >>> fired[0].rule, fired[0].since, fired[0].fired
    ('closure', 1, 2)
    """

    settings: AlertSettings = field(default_factory=AlertSettings)
    alerts: list[Alert] = field(default_factory=list)
    """Every alert so far, in the order in which they fired."""
    _streaks: dict[str, dict[str, _Streak]] = field(default_factory=lambda: defaultdict(dict))
    """Rule → subject → its broken rows since it was last kept."""
    _memory: dict[str, dict[Any, Any]] = field(default_factory=lambda: defaultdict(dict))
    """Rule → what it remembers itself."""

    def observe(self, batch: RowBatch) -> list[Alert]:
        """The alerts that fire with these rows, of one table and of whole steps; any split gives the same alerts."""
        judged: RowBatch | None = None
        found: list[tuple[int, int, bool, Alert]] = []
        with np.errstate(all="ignore"):
            for index, (rule, judge) in enumerate(JUDGES.get(batch.table, ())):
                rows = batch
                if rule.warmup:
                    rows = judged = judged or batch.after(self.settings.warmup_steps)
                if len(rows.step) and rule.name not in self.settings.off:
                    readings = judge(rows, self.settings, self._memory[rule.name])
                    if readings is not None:
                        found += [
                            (row, index, begins, a) for row, begins, a in self._take(rule, rows, readings)
                        ]
        found.sort(key=itemgetter(0, 1))
        self.alerts += [alert for *_, begins, alert in found if begins]
        return [alert for *_, alert in found]

    def observe_rows(self, table: str, rows: Sequence[Mapping[str, Any]]) -> list[Alert]:
        """The same for rows as dictionaries."""
        if not rows or table not in JUDGES:
            return []
        return self.observe(RowBatch(table, lambda name: [row.get(name) for row in rows]))

    @property
    def active(self) -> list[Alert]:
        """Alerts that have not ended."""
        return [alert for alert in self.alerts if alert.cleared is None]

    def _take(self, rule: Rule, rows: RowBatch, readings: Readings) -> Iterator[tuple[int, bool, Alert]]:
        """Each alert that begins or becomes critical: the row where it does, and whether it begins."""
        streaks, settings = self._streaks[rule.name], self.settings
        broken = readings.excess > 1
        if not streaks and not broken.any():
            return
        subjects = readings.subjects()
        chosen = relevant(subjects, broken, readings.excess <= settings.clear_at, streaks)
        needed = settings.sustain if rule.window == "sustain" else 1
        row = readings.row[chosen]
        step = rows.step[row]
        since = step if readings.since is None else readings.since[chosen]
        critical = np.zeros(len(chosen), np.bool_) if readings.critical is None else readings.critical[chosen]
        columns = (chosen, row, step, subjects.code[chosen], readings.excess[chosen], critical, since)
        for i, at, now, code, excess, worse, begun in zip(*(c.tolist() for c in columns), strict=True):
            subject = subjects.names[code]
            streak = streaks.get(subject)
            if rule.at_once and streak is not None and now - streak.last > settings.again_after:
                # Long past: whoever was told of the last one must hear of this one.
                _end(streak, streak.last)
                streak = None
            if excess <= 1:
                if streak is not None:
                    _end(streak, now)
                    del streaks[subject]
                continue
            if streak is None:
                streak = streaks[subject] = _Streak(since=begun, last=now)
            streak.count, streak.last = streak.count + 1, now
            # Critical must last as long as the warning does.
            streak.critical = streak.critical + 1 if worse else 0
            if excess > streak.worst:
                streak.worst, streak.text = excess, readings.text(i)
            begins, alert = streak.alert is None, _grown(rule, subject, streak, needed)
            if alert is not None:
                yield at, begins, alert


def _grown(rule: Rule, subject: str, streak: _Streak, needed: int) -> Alert | None:
    """The streak's alert where it begins, or becomes critical."""
    severity: Severity = "critical" if streak.critical >= needed else "warn"
    alert = streak.alert
    if alert is None:
        if streak.count < needed:
            return None
        alert = streak.alert = Alert(
            rule.name, subject, severity, streak.since, streak.last, streak.last, streak.count, streak.text,
            streak.worst,
        )  # fmt: skip
        return alert
    alert.last, alert.count = streak.last, streak.count
    alert.text, alert.worst = streak.text, streak.worst
    if severity == alert.severity or severity == "warn":
        return None
    alert.severity = severity
    return alert


def _end(streak: _Streak, step: int) -> None:
    if streak.alert is not None:
        streak.alert.cleared = step
