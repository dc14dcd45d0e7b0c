"""Alert rules: pure functions over rows, the hysteresis that keeps one spike from being an alert, and who is told.

The same engine runs beside the training and over a finished run, so both give the same alerts, also across resumes.

    rows ──> AlertingWriter ──> the store
                  │ engine: readings ──> streaks ──> alerts
                  ├──> health row `alert`, the log
                  └──> Notifier ──> command, webhook, trackers    (threads of their own)
    stored rows ──> replay.replay_run ──> the same engine           (reports; the past of a resumed attempt)
"""

from loopscope.alerts.config import AlertConfig
from loopscope.alerts.engine import Alert, AlertEngine
from loopscope.alerts.notice import AlertNotice, NoticeSink
from loopscope.alerts.replay_state import ReplayState
from loopscope.alerts.rules import Reading
from loopscope.alerts.settings import AlertOverrides, AlertSettings, Bounds, settings_for
from loopscope.alerts.table import RULES, Rule, rules_at
from loopscope.alerts.writer import AlertingWriter

__all__ = [
    "RULES",
    "Alert",
    "AlertConfig",
    "AlertEngine",
    "AlertNotice",
    "AlertOverrides",
    "AlertSettings",
    "AlertingWriter",
    "Bounds",
    "NoticeSink",
    "Reading",
    "ReplayState",
    "Rule",
    "rules_at",
    "settings_for",
]
