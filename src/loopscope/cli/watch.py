"""`loopscope watch RUN`: a run in the terminal while it trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.live import Live

from loopscope.alerts import AlertOverrides
from loopscope.analysis import open_run
from loopscope.analysis.liveness import liveness
from loopscope.cli.console import make_console
from loopscope.cli.live_view import view
from loopscope.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Show losses, the loop, the worst visits and alerts, and look again every few seconds.

    Ends by itself when the run does, or with Ctrl-C. In a pipe it prints once.
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    every: float = 2.0
    """Seconds between two looks."""
    once: bool = False
    """Print once and end."""
    warmup_steps: int | None = None
    """Steps at the start that routing and loop are not judged by; default: as the run was trained."""
    sustain: int | None = None
    """Traces in a row that must break a rule's bound before it is an alert; default: as the run was trained."""

    def run(self) -> int:
        """Show until the run ends or somebody interrupts; 0.

        Raises:
            NotARunError: `path` holds no run.
            ConfigError: a flag is wrong.
        """
        if not 0.2 <= self.every <= 3600:
            raise ConfigError(f"--every is {self.every}, expected seconds from 0.2 to 3600. Change --every.")
        settings = AlertOverrides(warmup_steps=self.warmup_steps, sustain=self.sustain)
        console = make_console()
        if self.once or not console.is_terminal:
            console.print(view(open_run(self.path), settings))
            return 0
        try:
            with Live(view(open_run(self.path), settings), console=console, auto_refresh=False) as live:
                while liveness(self.path) == "live":
                    time.sleep(self.every)
                    live.update(view(open_run(self.path), settings), refresh=True)
        except KeyboardInterrupt:
            # The last picture stays on the screen; that somebody stopped looking is no error.
            pass
        return 0
