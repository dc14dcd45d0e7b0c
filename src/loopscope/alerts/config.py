"""What a run is told of its alerts: the rules' bounds, and who hears of it."""

import shlex
from dataclasses import dataclass, field
from typing import Literal, get_args

from loopscope.alerts.command import Command
from loopscope.alerts.notice import NoticeSink
from loopscope.alerts.webhook import HIDDEN, Webhook, check_url, redacted
from loopscope.catalog.alert_settings import AlertSettings
from loopscope.errors import ConfigError

Severity = Literal["warn", "critical"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlertConfig:
    """Alerts of a run: what is judged beside the training, and where an alert is told besides the log.

    >>> AlertConfig(rules=AlertSettings(sustain=5, off=("z",)), command=("notify", "--team", "a b")).command
    ('notify', '--team', 'a b')
    """

    enabled: bool = True
    """Judge the rows while training. Off, a report still judges the finished run."""
    rules: AlertSettings = field(default_factory=AlertSettings)
    """The rules' bounds, and the rules that are off."""
    command: tuple[str, ...] = ()
    """Program with arguments that is run per notice, without a shell; the notice is JSON on its standard input and
    LOOPSCOPE_ALERT_* in its environment. A single text is taken apart as a shell would."""
    webhook: str = field(default="", repr=False)
    """Web address that notices are POSTed to as JSON; or env:NAME, an environment variable with the address."""
    min_severity: Severity = "warn"
    """"critical" leaves warnings to the log and the health table: command, webhook and trackers do not hear them."""
    gather_s: float = 600.0
    """After a notice, further ones of the same rule and severity are gathered for so many seconds and told as one.
    0 tells each at once."""
    timeout_s: float = 10.0
    """Seconds that one delivery may take."""

    def __post_init__(self) -> None:
        if not isinstance(self.rules, AlertSettings):
            raise ConfigError(f"rules is a {type(self.rules).__name__}, expected AlertSettings(...)")
        object.__setattr__(self, "command", _argv(self.command))
        if not isinstance(self.webhook, str):
            raise ConfigError(f"webhook is a {type(self.webhook).__name__}, expected text")
        if self.webhook:
            check_url(self.webhook)
        if self.min_severity not in get_args(Severity):
            raise ConfigError(f"min_severity is {self.min_severity!r}, expected 'warn' or 'critical'")
        for name, least in (("gather_s", 0.0), ("timeout_s", 0.1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 86400:
                raise ConfigError(f"{name} is {value!r}, expected seconds from {least:g} to 86400")

    def sinks(self) -> dict[str, NoticeSink]:
        """Name → what delivers a notice there.

        Raises:
            ConfigError: the command is no program, or the webhook's variable is not set.
        """
        found: dict[str, NoticeSink] = {}
        if self.command:
            found["command"] = Command(self.command, timeout_s=self.timeout_s)
        if self.webhook:
            found["webhook"] = Webhook(self.webhook, timeout_s=self.timeout_s)
        return found

    def as_plain(self) -> dict[str, object]:
        """Plain types for run.json, without secrets: of the webhook its host, of the command its program."""
        return {
            "enabled": self.enabled,
            "rules": self.rules.as_plain(),
            "command": [self.command[0], *([HIDDEN] if len(self.command) > 1 else [])]
            if self.command
            else [],
            "webhook": redacted(self.webhook),
            "min_severity": self.min_severity,
            "gather_s": self.gather_s,
            "timeout_s": self.timeout_s,
        }


def _argv(given: object) -> tuple[str, ...]:
    parts = (given,) if isinstance(given, str) else given
    if not isinstance(parts, tuple | list) or not all(
        isinstance(part, str) and "\0" not in part for part in parts
    ):
        raise ConfigError("command is not a list of texts, expected a program and its arguments")
    if len(parts) == 1:
        try:
            parts = shlex.split(parts[0])
        except ValueError as error:
            raise ConfigError(f"command cannot be taken apart ({error}); expected balanced quotes") from None
    if parts and not parts[0]:
        raise ConfigError("command begins with an empty text, expected a program")
    return tuple(parts)
