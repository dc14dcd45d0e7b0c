"""How the scheduler says that it takes the machine away: by a signal, a file or a variable, as configured."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from loopscope.errors import ConfigError

RECORDED = ("SIGTERM", "SIGHUP")
"""Signals that are recorded in any case. SIGINT is a KeyboardInterrupt, and recorded as one."""
_NEVER = ("SIGKILL", "SIGSTOP", "SIGINT", "SIGCHLD", "SIGCONT")


def check_preempted_by(said: Sequence[str]) -> tuple[str, ...]:
    """The configured signs, where each is "SIGUSR1", "file:PATH" or "env:NAME".

    Raises:
        ConfigError: one is none of them, or a signal that cannot be recorded.
    """
    if isinstance(said, str):
        raise ConfigError(
            f"preempted_by is {said!r}, expected a tuple such as ('SIGUSR1', 'file:/run/preempted')"
        )
    for sign in said:
        kind, _, rest = sign.partition(":")
        if kind in ("file", "env") and rest:
            continue
        if (
            not hasattr(signal, sign)
            or not sign.startswith("SIG")
            or sign.startswith("SIG_")
            or sign in _NEVER
        ):
            raise ConfigError(
                f"preempted_by holds {sign!r}, expected the name of a signal (not {', '.join(_NEVER)}), 'file:PATH' "
                "or 'env:NAME': what the scheduler sends, makes or sets before it takes the machine away"
            )
    return tuple(said)


def recorded_signals(said: Sequence[str]) -> tuple[str, ...]:
    """Names of the signals to record, those of the scheduler among them."""
    return tuple(dict.fromkeys([*RECORDED, *preempting(said)]))


def preempting(said: Sequence[str]) -> list[str]:
    """The scheduler's signals."""
    return [sign for sign in said if ":" not in sign]


class Notices:
    """The scheduler's files and variables, which count once they change: an old one may lie about from before."""

    def __init__(self, said: Sequence[str]) -> None:
        self._before = {sign: _seen(sign) for sign in said if ":" in sign}

    def given(self) -> str:
        """The first sign that is there now and was not, or was another, at the start; empty where none is."""
        return next((s for s, before in self._before.items() if (now := _seen(s)) and now != before), "")


def _seen(sign: str) -> str:
    kind, _, rest = sign.partition(":")
    if kind == "env":
        return os.environ.get(rest, "")
    try:
        stat = Path(rest).stat()
    except OSError:
        return ""
    return f"{stat.st_ino} {stat.st_mtime_ns}"
