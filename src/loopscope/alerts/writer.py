"""The rules beside the training: a writer that judges the rows on their way to the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from loopscope.alerts.engine import Alert, AlertEngine
from loopscope.alerts.settings import AlertSettings
from loopscope.alerts.table import RULES

_log = logging.getLogger("loopscope.alerts")

# Their rules look at one row at a time. The others look at a whole trace, which is complete when the next begins.
_BY_ROW = ("loss", "health")
_KEYS = (
    "run_id",
    "attempt",
    "step",
    "rank",
    "world_size",
    "aggregation_scope",
    "tokens_seen",
    "elapsed_s",
    "wall_time",
)


class _Rows(Protocol):
    def append(self, table: str, row: Mapping[str, object]) -> None: ...
    def flush(self, durable: bool = False) -> None: ...
    def close(self) -> None: ...
    @property
    def dropped(self) -> int: ...


class AlertingWriter:
    """Hands every row on, and writes a health row `alert` and a line of the log where a rule's alert begins.

    Global rows are judged where there are any, else the writer's own. An attempt begins without a past: a bound that
    was broken before a resume must be broken for the whole window again. A replay over the run has no such gap.
    """

    def __init__(
        self,
        inner: _Rows,
        settings: AlertSettings | None = None,
        *,
        on_error: Literal["record", "raise"] = "record",
    ) -> None:
        self.engine = AlertEngine(settings or AlertSettings())
        """What was found so far."""
        self.errors = 0
        """Failures of the judgement itself; the rows were written nevertheless."""
        self._inner, self._on_error = inner, on_error
        self._traces: dict[str, list[Mapping[str, Any]]] = {}

    def append(self, table: str, row: Mapping[str, object]) -> None:
        """Hand one row on, then judge it or its trace."""
        self._inner.append(table, row)
        try:
            self._see(table, row)
        except Exception as error:
            self.errors += 1
            if self._on_error == "raise":
                raise
            if self.errors == 1:
                _log.warning("a row of %s could not be judged: %s: %s", table, type(error).__name__, error)

    def flush(self, durable: bool = False) -> None:
        """Hand on."""
        self._inner.flush(durable=durable)

    def close(self) -> None:
        """Judge what is left, and hand on."""
        try:
            for table in list(self._traces):
                self._judge(table, self._traces.pop(table))
        except Exception:
            self.errors += 1
            if self._on_error == "raise":
                raise
        finally:
            self._inner.close()

    @property
    def dropped(self) -> int:
        """Rows that could not be written so far."""
        return self._inner.dropped

    def _see(self, table: str, row: Mapping[str, Any]) -> None:
        if table in _BY_ROW:
            self._judge(table, [row])
        elif table in ("router", "residual", "transition"):
            trace = self._traces.get(table, [])
            if trace and trace[0].get("step") != row.get("step"):
                self._judge(table, trace)
                trace = []
            trace.append(row)
            self._traces[table] = trace

    def _judge(self, table: str, rows: list[Mapping[str, Any]]) -> None:
        whole = [row for row in rows if row.get("aggregation_scope") == "global"] or rows
        for alert in self.engine.observe(table, whole[0]["step"], whole):
            self._tell(alert, whole[0])

    def _tell(self, alert: Alert, row: Mapping[str, Any]) -> None:
        rule = RULES[alert.rule]
        text = f"{rule.title}. {alert.subject}, since step {alert.since}: {alert.text}"
        _log.warning("%s at step %s: %s", alert.severity, alert.fired, text)
        if rule.at_once:
            return  # It is about a health row, or one is written beside it.
        found = {
            "event": "alert",
            "severity": alert.severity,
            "count": alert.count,
            "detail": f"{alert.rule}: {text}",
        }
        self._inner.append("health", {key: row[key] for key in _KEYS if key in row} | found)
