"""The alert rules at work: the hysteresis that keeps one spike from being an alert, and who is told.

The rules themselves are in `loopscope.catalog.rules`. The same engine runs beside the training, a step at a time, and
over a finished run, many steps at a time, so both give the same alerts, also across resumes.

    rows ──> AlertingWriter ──> the store
                  │ AlertObserver: batches of one step ──> engine: readings ──> streaks ──> alerts
                  ├──> health row `alert`, the log
                  └──> Notifier ──> command, webhook, trackers    (threads of their own)
    stored rows ──> batches ──> replay_run: the same engine       (reports; the state before a resumed attempt)
"""

from loopscope.alerts.config import AlertConfig
from loopscope.alerts.engine import Alert, AlertEngine
from loopscope.alerts.notice import AlertNotice, NoticeSink
from loopscope.alerts.observer import AlertObserver
from loopscope.alerts.replay_state import ReplayState
from loopscope.alerts.settings import AlertOverrides, Bounds, settings_for
from loopscope.alerts.writer import AlertingWriter
from loopscope.catalog.alert_settings import AlertSettings
from loopscope.catalog.rule import Rule
from loopscope.catalog.rule_registry import RULES, rules_at

__all__ = [
    "RULES",
    "Alert",
    "AlertConfig",
    "AlertEngine",
    "AlertNotice",
    "AlertObserver",
    "AlertOverrides",
    "AlertSettings",
    "AlertingWriter",
    "Bounds",
    "NoticeSink",
    "ReplayState",
    "Rule",
    "rules_at",
    "settings_for",
]
