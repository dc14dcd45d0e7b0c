"""A notice to a program of the user's: as JSON on its standard input, and in its environment."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

from loopscope.alerts.notice import AlertNotice
from loopscope.errors import ConfigError, LoopscopeError

_PREFIX = "LOOPSCOPE_ALERT_"
_IN_ENVIRONMENT = (
    "run_id", "run_name", "attempt", "step", "rule", "severity", "subject", "since", "title", "text", "why",
)  # fmt: skip


class Command:
    """Runs a program per notice, without a shell. Its output goes nowhere; a status other than 0 is a failure."""

    def __init__(self, argv: Sequence[str], *, timeout_s: float) -> None:
        """Find the program.

        Raises:
            ConfigError: there is none of this name.
        """
        program = shutil.which(argv[0])
        if program is None:
            raise ConfigError(
                f"the alert command {argv[0]!r} is not a program that can be run, expected one on the PATH or the path "
                "of an executable file. Name another, or make it executable (chmod +x)."
            )
        self._argv = [program, *argv[1:]]
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, notice: AlertNotice) -> None:
        """Run it and wait for it.

        Raises:
            LoopscopeError: it failed, or did not end in time and was killed.
        """
        process = self._process = subprocess.Popen(
            self._argv,
            env={**os.environ, **environment(notice)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A group of its own, so that what it started ends with it.
            start_new_session=True,
        )
        try:
            process.communicate(f"{notice.as_json()}\n".encode(), timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            self.cancel()
            raise LoopscopeError(f"did not end within {self._timeout_s:g} s, and was killed") from None
        finally:
            self._process = None
        if process.returncode < 0:
            raise LoopscopeError(f"was ended by signal {-process.returncode}")
        if process.returncode:
            raise LoopscopeError(f"ended with status {process.returncode}")

    def cancel(self) -> None:
        """Kill what runs, and everything that it started."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment(notice: AlertNotice) -> dict[str, str]:
    """`LOOPSCOPE_ALERT_RULE` and so on, for programs that read no JSON; `LOOPSCOPE_ALERT_MESSAGE` has it all."""
    found = {_PREFIX + name.upper(): str(getattr(notice, name)) for name in _IN_ENVIRONMENT}
    found[_PREFIX + "MESSAGE"] = notice.message()
    # A value cannot hold a NUL.
    return {name: text.replace("\0", "") for name, text in found.items()}
