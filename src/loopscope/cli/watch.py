"""`loopscope watch RUN`: a run in the terminal while it trains."""

import errno
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console, Group
from rich.live import Live

from loopscope.alerts import AlertOverrides
from loopscope.analysis import open_run
from loopscope.analysis.liveness import liveness
from loopscope.cli.console import make_console, signal_handlers
from loopscope.cli.flags import RuleFlags
from loopscope.cli.live_view import view
from loopscope.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch(RuleFlags):
    """Show losses, the loop, the worst visits and alerts, and look again every few seconds.

    Ends by itself when the run does, with Ctrl-C or SIGTERM, or with its terminal. In a pipe it prints once.
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    every: float = 2.0
    """Seconds between two looks."""
    once: bool = False
    """Print once and end."""

    def run(self) -> int:
        """Show until the run ends or somebody ends it; 0.

        Raises:
            NotARunError: `path` holds no run.
            ConfigError: a flag is wrong.
        """
        if not 0.2 <= self.every <= 3600:
            raise ConfigError(f"--every is {self.every}, expected seconds from 0.2 to 3600. Change --every.")
        settings = self.bounds()
        console = make_console()
        if self.once or not console.is_terminal:
            console.print(self._look(console, settings))
            return 0
        try:
            # They end the look as Ctrl-C does, so that the terminal gets its cursor back. The last picture stays on
            # the screen; that somebody stopped looking is no error.
            with (
                suppress(KeyboardInterrupt),
                signal_handlers(signal.default_int_handler, "SIGTERM", "SIGHUP"),
            ):
                self._follow(console, settings)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            # The terminal is gone; Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

    def _look(self, console: Console, settings: AlertOverrides) -> Group:
        return view(open_run(self.path, partial=True), settings, width=console.width)

    def _follow(self, console: Console, settings: AlertOverrides) -> None:
        """One look over the other; under it in a terminal that cannot go back up."""
        # Alerts come first: what does not fit into a low window is cut off at its end.
        live = None if console.is_dumb_terminal else Live(console=console, auto_refresh=False)
        with live or nullcontext():
            while True:
                look = self._look(console, settings)
                console.print(look) if live is None else live.update(look, refresh=True)
                # A terminal that was closed is none any more; nothing that is written to it fails.
                if liveness(self.path) not in ("running", "silent") or not console.is_terminal:
                    return
                time.sleep(self.every)
                if live is None:
                    console.rule()
