"""The rules beside the training: they see every row that is written, and tell where an alert begins."""

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from loopscope.alerts.config import AlertConfig
from loopscope.alerts.delivery import Notifier
from loopscope.alerts.engine import Alert, AlertEngine
from loopscope.alerts.gather import notices
from loopscope.alerts.notice import NoticeSink
from loopscope.alerts.replay_state import ReplayState, Told, key_of
from loopscope.catalog.alert_settings import AlertSettings
from loopscope.catalog.rows import SCOPE, columns_of, speaking
from loopscope.catalog.rule_registry import RULES, rules_at
from loopscope.catalog.tables.keys import OWN_STEP_NAMES, RUN_KEY_NAMES
from loopscope.store import RowWriter

_log = logging.getLogger("loopscope.alerts")

# Their rules look at one row at a time. The others look at a whole trace.
_BY_ROW = ("loss", "health")
_BY_TRACE = ("router", "residual", "transition")
# A traced step ends with this event; without it a trace is known to be complete when the next begins.
_END_OF_TRACE = "coverage"
_NOT_DELIVERED = "alert_not_delivered"


class AlertObserver:
    """Judges rows, and tells where a rule's alert begins: a health row `alert`, a line of the log, a notice.

    Global rows are judged where there are any, else the writer's own. Nothing here raises into the training loop
    under "record", and nothing waits for a delivery but `close`, for 5 seconds at most.

    Args:
        rows: takes the health rows of alerts, and counts what it could not write.
        settings: bounds of the rules.
        sinks: name → what delivers a notice; besides the log and the health table.
        config: what is delivered, and how patiently; its rules are the bounds where `settings` is None.
        state: what a replay of the run before this attempt found; None where there was none.
        run_name: the run's name for people.
        speaks: False for a rank whose rows are not the run's: its events go to its log, and that is all.
        on_error: "record" counts failures of the judgement, "raise" lets them out.
    """

    def __init__(
        self,
        rows: RowWriter,
        settings: AlertSettings | None = None,
        *,
        sinks: Mapping[str, NoticeSink] | None = None,
        config: AlertConfig | None = None,
        state: ReplayState | None = None,
        run_name: str = "",
        speaks: bool = True,
        on_error: Literal["record", "raise"] = "record",
    ) -> None:
        config = config or AlertConfig()
        settings = settings or config.rules
        self.engine = AlertEngine(settings) if state is None else state.engine
        """What was found so far, in this attempt and before it."""
        self.errors = 0
        """Failures of the judgement itself; the rows were written nevertheless."""
        self._rows, self._on_error = rows, on_error
        self._run_name, self._speaks = run_name, speaks
        self._rules = rules_at(settings)
        self._only_critical = config.min_severity == "critical"
        self._settled = False
        self._notifier = Notifier(sinks or {}, timeout_s=config.timeout_s, gather_s=config.gather_s)
        self._told = frozenset[Told]() if state is None else state.told
        self._untold = [] if state is None else list(state.untold)
        self._traces: dict[str, list[Mapping[str, Any]]] = {}
        self._keys: dict[str, Any] = {}
        self._lost = self._counters()
        self._pid = os.getpid()

    def add_sinks(self, sinks: Mapping[str, NoticeSink]) -> None:
        """Tell these as well: what was started after this writer, and writes rows of its own through it."""
        self._notifier.add(sinks)

    def see(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of one table that were written, in order."""
        if os.getpid() != self._pid:
            return  # a forked child, such as a data loader's worker, has nothing to tell
        try:
            if self._untold and rows:
                missed, self._untold = self._untold, []
                self._tell(missed, rows[0])
            if table in _BY_TRACE:
                self._gather(table, rows)
            elif table in _BY_ROW:
                for row in rows:
                    self._judge_row(table, row)
            self._write_failures()
        except Exception as error:
            self.errors += 1
            if self._on_error == "raise":
                raise
            if self.errors == 1:
                _log.warning("a row of %s could not be judged: %s: %s", table, type(error).__name__, error)

    def close(self) -> None:
        """Judge what is left and wait a little for deliveries; rows may still come. A second call does nothing."""
        if self._settled or os.getpid() != self._pid:
            return
        self._settled = True
        try:
            for table in list(self._traces):
                if trace := self._traces.pop(table):
                    self._judge(table, trace)
            self._notifier.close()
            self._write_failures()
        except Exception:
            self.errors += 1
            if self._on_error == "raise":
                raise

    def _gather(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the rows of a trace together until it is complete."""
        if not self._speaks:
            return
        for step, found in groupby(rows, key=lambda row: row.get("step")):
            trace = self._traces.setdefault(table, [])
            if trace and trace[0].get("step") != step:
                self._judge(table, trace)
                trace = self._traces[table] = []
            trace.extend(found)

    def _judge_row(self, table: str, row: Mapping[str, Any]) -> None:
        if not self._speaks and table != "health":
            return
        if table == "health" and row.get("event") == _END_OF_TRACE:
            for of, trace in list(self._traces.items()):
                if trace and trace[0].get("step") == row.get("step"):
                    self._judge(of, self._traces.pop(of))
        self._judge(table, [row])
        self._see_dropped(row)

    def _see_dropped(self, row: Mapping[str, Any]) -> None:
        """The store counts what its disk refused, and writes that down, past us, when it can again."""
        now = self._counters()
        if now == self._lost:
            return
        lost, self._lost = self._lost, now
        for name, count in now.items():
            if count > lost[name]:
                event = {"event": name, "severity": "critical", "count": count - lost[name]}
                self._judge("health", [{key: row[key] for key in RUN_KEY_NAMES if key in row} | event])

    def _counters(self) -> dict[str, int]:
        return {
            "dropped_rows": self._rows.dropped,
            "fsync_failed": self._rows.fsync_failures,
        }

    def _judge(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if len({row.get("aggregation_scope") for row in rows}) > 1:
            keep = speaking(columns_of(rows, SCOPE))
            rows = [row for row, speaks in zip(rows, keep, strict=True) if speaks]
        fired = self.engine.observe_rows(table, rows)
        if fired:
            self._tell(fired, rows[0])

    def _tell(self, alerts: list[Alert], row: Mapping[str, Any]) -> None:
        keys = self._keys = {key: row[key] for key in RUN_KEY_NAMES if key in row}
        if self._speaks:
            self._write_alerts(alerts, keys)
        # After a rollback the same steps may break the same bound once more: people know.
        new = [alert for alert in alerts if key_of(alert) not in self._told]
        run_id, attempt = str(keys.get("run_id") or ""), keys.get("attempt") or 1
        for notice in notices(
            new, keys["step"], self._rules, run_id=run_id, run_name=self._run_name, attempt=attempt
        ):
            _log.warning(
                "%s at step %s: %s. %s", notice.severity, notice.step, notice.title, notice.sentence()
            )
            if self._speaks and not (self._only_critical and notice.severity != "critical"):
                # That a delivery failed is told by the other ways.
                self._notifier.send(notice, skip_failed=notice.places == (_NOT_DELIVERED,))

    def _write_alerts(self, alerts: list[Alert], keys: Mapping[str, Any]) -> None:
        for alert in alerts:
            if RULES[alert.rule].at_once:
                continue  # It is about a health row, or one is written beside it.
            title, place = RULES[alert.rule].title, f"{alert.subject}, since step {alert.since}"
            found = {
                "event": "alert",
                "severity": alert.severity,
                "count": alert.count,
                "rule": alert.rule,
                "subject": alert.subject,
                "since": alert.since,
                "detail": f"{alert.rule}: {title}. {place}: {alert.text}",
            }
            self._rows.append("health", {**keys, **found})

    def _write_failures(self) -> None:
        for failure in self._notifier.failures():
            notice = failure.notice
            keys = {name: value for name, value in self._keys.items() if name not in OWN_STEP_NAMES}
            row = {
                **keys,
                "step": notice.step,
                "event": _NOT_DELIVERED,
                "severity": "warn",
                "count": notice.num_places,
                "detail": f"{failure.receiver}: {failure.reason} ({notice.rule} at step {notice.step})",
            }
            _log.warning("an alert was not delivered: %s", row["detail"])
            self._rows.append("health", row)
            self._judge_row("health", row)
