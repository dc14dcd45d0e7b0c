"""Rows in the order of training, alerts out: beside the training and over a finished run alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from loopscope.alerts import rules
from loopscope.alerts.rules import Reading, Row
from loopscope.alerts.settings import AlertSettings
from loopscope.alerts.table import EVENTS, RULES
from loopscope.alerts.windows import BestMean, DeadWindow

Severity = Literal["warn", "critical"]

_PER_VISIT = (rules.maxvio, rules.load_entropy, rules.router_collapse, rules.z)


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
    count: int
    worst: Reading
    last: int
    critical: int = 0
    alert: Alert | None = None


@dataclass(slots=True)
class AlertEngine:
    """Judges rows as they come. Feed every table's rows in the order of their steps; tables may interleave.

    >>> engine = AlertEngine(AlertSettings(warmup_steps=0, sustain=2))
    >>> for step in (1, 2):
    ...     fired = engine.observe("loss", step, [{"closure_error": 0.5, "total_loss": 1.0}])
    >>> fired[0].rule, fired[0].since, fired[0].fired
    ('closure', 1, 2)
    """

    settings: AlertSettings = field(default_factory=AlertSettings)
    alerts: list[Alert] = field(default_factory=list)
    """Every alert so far, in the order in which they fired."""
    _streaks: dict[tuple[str, str], _Streak] = field(default_factory=dict)
    _dead: dict[str, DeadWindow] = field(default_factory=dict)
    _best: dict[tuple[int, int], BestMean] = field(default_factory=dict)

    def observe(self, table: str, step: int, rows: Iterable[Row]) -> list[Alert]:
        """The alerts that fire with these rows, all of one table and step and of one scope."""
        judge = self._judges().get(table)
        if judge is None:
            return []
        fired = []
        for reading in judge(step, list(rows)):
            alert = self._take(step, reading)
            if alert is not None:
                fired.append(alert)
        return fired

    @property
    def active(self) -> list[Alert]:
        """Alerts that have not ended."""
        return [alert for alert in self.alerts if alert.cleared is None]

    def best_mean(self, layer: int, loop_step: int) -> BestMean:
        """The best mean of relative_delta at a layer's last step boundary.

        Loops of another depth end at another place: a best mean belongs to one depth.
        """
        key = (layer, loop_step)
        found = self._best.get(key)
        if found is None:
            found = self._best[key] = BestMean(self.settings.sustain)
        return found

    def _judges(self) -> dict[str, Callable[[int, list[Row]], Iterator[Reading]]]:
        return {
            "loss": self._loss,
            "router": self._router,
            "residual": self._residual,
            "transition": self._transition,
            "health": self._health,
        }

    def _take(self, step: int, reading: Reading) -> Alert | None:
        if reading.rule in self.settings.off:
            return None
        rule = RULES[reading.rule]
        key = (reading.rule, reading.subject)
        streak = self._streaks.get(key)
        if rule.at_once and streak is not None and step - streak.last > self.settings.again_after:
            # Long past: whoever was told of the last one must hear of this one.
            if streak.alert is not None:
                streak.alert.cleared = streak.last
            streak = None
        if reading.excess <= 1:
            if streak is not None and reading.excess <= self.settings.clear_at:
                if streak.alert is not None:
                    streak.alert.cleared = step
                del self._streaks[key]
            return None
        if streak is None:
            since = step if reading.since is None else reading.since
            streak = self._streaks[key] = _Streak(since=since, count=0, worst=reading, last=step)
        streak.count, streak.last = streak.count + 1, step
        # Critical must last as long as the warning does.
        streak.critical = streak.critical + 1 if reading.critical else 0
        if reading.excess > streak.worst.excess:
            streak.worst = reading
        needed = 1 if rule.at_once or rule.own_window else self.settings.sustain
        return self._grown(step, reading, streak, needed=needed)

    def _grown(self, step: int, reading: Reading, streak: _Streak, *, needed: int) -> Alert | None:
        severity: Severity = "critical" if streak.critical >= needed else "warn"
        alert = streak.alert
        if alert is None:
            if streak.count < needed:
                return None
            worst = streak.worst
            alert = streak.alert = Alert(
                reading.rule, reading.subject, severity, streak.since, step, step, streak.count, worst.text,
                worst.excess,
            )  # fmt: skip
            self.alerts.append(alert)
            return alert
        alert.last, alert.count = step, streak.count
        alert.text, alert.worst = streak.worst.text, streak.worst.excess
        if severity == "critical" and alert.severity == "warn":
            alert.severity = "critical"
            return alert
        return None

    def _loss(self, step: int, rows: list[Row]) -> Iterator[Reading]:
        for row in rows:
            found = rules.closure(row, self.settings)
            if found is not None:
                yield found
            if names := row.get("nonfinite_fields"):
                text = f"not finite: {names}"
                yield Reading("nonfinite", "loss components", 1.0, float("inf"), True, text)

    def _router(self, step: int, rows: list[Row]) -> Iterator[Reading]:
        if step <= self.settings.warmup_steps:
            return
        for row, subject in rules.visit_names(rows):
            dead = self._dead_expert(step, row, subject)
            if dead is not None:
                yield dead
            for rule in _PER_VISIT:
                found = rule(row, subject, self.settings)
                if found is not None:
                    yield found

    def _dead_expert(self, step: int, row: Row, subject: str) -> Reading | None:
        number, experts, k, tokens = (
            row.get(n) for n in ("dead_experts", "num_experts", "top_k", "num_tokens")
        )
        if number is None or not experts or not k or not tokens:
            return None
        window = self._dead.get(subject)
        if window is None:
            window = DeadWindow(self.settings.sustain, self.settings.dead_expected)
            self._dead[subject] = window
        counts = row.get("expert_count") if number else None
        dead = window.see(counts, due=tokens * k / experts, step=step)
        if not dead:
            return Reading("dead_expert", subject, 0.0, 0.0)
        named = ", ".join(str(e) for e in dead[:8]) + (", ..." if len(dead) > 8 else "")
        which = f"expert {named}" if len(dead) == 1 else f"{len(dead)} experts ({named})"
        text = f"{which} of {experts} got no token over {self.settings.sustain} traces or more"
        return Reading(
            "dead_expert", subject, float(len(dead)), 1.0 + len(dead), False, text, window.since(dead)
        )

    def _residual(self, step: int, rows: list[Row]) -> Iterator[Reading]:
        loop = [row for row in rows if row.get("block") == "loop"]
        if step <= self.settings.warmup_steps or not loop:
            return
        last = max(loop, key=lambda row: int(row["unrolled_pos"]))
        found = rules.token_correlation(last, "last loop visit", self.settings)
        if found is not None:
            yield found

    def _transition(self, step: int, rows: list[Row]) -> Iterator[Reading]:
        if step <= self.settings.warmup_steps:
            return
        layers: dict[int, list[Row]] = {}
        for row in rows:
            if row.get("kind") == "step_boundary":
                layers.setdefault(row["to_layer_idx"], []).append(row)
        for layer, pairs in sorted(layers.items()):
            pairs.sort(key=lambda row: int(row["to_loop_step"]))
            yield from self._layer(f"layer {layer}", pairs)

    def _layer(self, subject: str, pairs: list[Row]) -> Iterator[Reading]:
        growths = [row["growth"] for row in pairs if row.get("growth") is not None]
        found = rules.loop_growth(growths, subject, self.settings)
        if found is not None:
            yield found
        best = self.best_mean(pairs[-1]["to_layer_idx"], pairs[-1]["to_loop_step"])
        delta = pairs[-1].get("relative_delta")
        found = rules.loop_delta(delta, best.best, subject, self.settings)
        if delta is not None:
            best.see(delta)
        if found is not None:
            yield found

    def _health(self, step: int, rows: list[Row]) -> Iterator[Reading]:
        for row in rows:
            found = rules.health_events(row, EVENTS)
            if found is not None:
                yield found
