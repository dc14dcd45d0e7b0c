"""Starts torchrun, shows what rank 0 says, and hands signals on."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from loopscope.cli.console import make_console, signal_handlers, step_progress

_TORCHRUN = "loopscope.integrations.torchtitan.torchrun"
_LAUNCHER = "loopscope.integrations.torchtitan.launch"
_STEP = re.compile(r"step:\s*(?:\x1b\[[0-9;]*m)*\s*(\d+)")
"""torchtitan's log line of a step; colours may stand between."""


def torchrun_command(arguments: Sequence[str], *, ranks: int, log_dir: Path) -> list[str]:
    """The whole command line: every rank's output goes to files below `log_dir`, rank 0's also to the terminal."""
    return [
        *(sys.executable, "-m", _TORCHRUN),
        *("--standalone", "--nproc-per-node", str(ranks), "--role", "rank"),
        *("--tee", "3", "--local-ranks-filter", "0", "--log-dir", str(log_dir)),
        *("-m", _LAUNCHER),
        *arguments,
    ]


def run_ranks(
    arguments: Sequence[str], *, ranks: int, steps: int, environment: Mapping[str, str], out: Path
) -> int:
    """Run the job to its end and return its exit status: 0, 1 (failed), 2 (a setting was wrong), 130 (interrupted).

    On a terminal a progress bar follows the steps; elsewhere the output passes through untouched.
    """
    log_dir = out.resolve() / "torchtitan" / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    console = make_console(stderr=True)
    piped = console.is_terminal
    with _signals_forwarded() as (received, started):
        process = subprocess.Popen(
            torchrun_command(arguments, ranks=ranks, log_dir=log_dir),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            text=True,
            errors="replace",
            # A session of its own: Ctrl-C would otherwise reach it from the terminal and from us.
            start_new_session=True,
        )
        started(process)
        if process.stdout is not None:
            _show(process.stdout, console, steps)
        status = process.wait()
    if received:
        print(f"loopscope train: stopped by {signal.Signals(received[0]).name}", file=sys.stderr)
        return 128 + received[0]
    if status:
        print(f"loopscope train: failed; what every rank printed lies below {log_dir}", file=sys.stderr)
    return status if status in (0, 2) else 1


def _show(lines: Iterable[str], console: Console, steps: int) -> None:
    with step_progress(console) as progress:
        task = progress.add_task("training", total=steps)
        for line in lines:
            if sys.stdout.isatty():
                progress.console.print(Text.from_ansi(line.rstrip("\n")), soft_wrap=True)
            else:
                print(line, end="", flush=True)
            if match := _STEP.search(line):
                progress.update(task, completed=int(match.group(1)))


@contextmanager
def _signals_forwarded() -> Iterator[tuple[list[int], Callable[[subprocess.Popen[str]], None]]]:
    """Hands the first SIGINT or SIGTERM on to the process given to the second value; the first lists them.

    Our handlers are in place before the process starts: a signal that this process ignores (as a shell makes
    its background jobs do) would be ignored by every rank as well, and nothing could stop them.
    """
    received: list[int] = []
    running: list[subprocess.Popen[str]] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            # A second signal would break off torchrun's own shutdown and leave the ranks behind.
            print("loopscope train: already stopping; ranks that do not end get killed", file=sys.stderr)
        elif running and running[0].poll() is None:
            running[0].send_signal(number)

    def started(process: subprocess.Popen[str]) -> None:
        running.append(process)
        if received:  # it came between our handler and the start
            process.send_signal(received[0])

    try:
        with signal_handlers(forward, "SIGINT", "SIGTERM"):
            yield received, started
    finally:
        for process in running:
            if process.poll() is None:  # only where we ourselves failed: never leave ranks behind
                process.terminate()
                process.wait()
