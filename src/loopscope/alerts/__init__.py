"""Alert rules: pure functions over rows, and the hysteresis that keeps one spike from being an alert.

The same engine runs beside the training and over a finished run, so both give the same alerts.
"""

from loopscope.alerts.engine import Alert, AlertEngine
from loopscope.alerts.notice import AlertNotice, NoticeSink
from loopscope.alerts.rules import Reading
from loopscope.alerts.settings import AlertSettings
from loopscope.alerts.table import RULES, Rule
from loopscope.alerts.writer import AlertingWriter

__all__ = [
    "RULES",
    "Alert",
    "AlertEngine",
    "AlertNotice",
    "AlertSettings",
    "AlertingWriter",
    "NoticeSink",
    "Reading",
    "Rule",
]
