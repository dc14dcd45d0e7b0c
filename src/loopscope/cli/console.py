"""What every verb shares on the terminal: numbers, tables, and progress that keeps quiet in a pipe."""

import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

MISSING = "–"
"""Shown where there is no value; the reason follows where one is known."""


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout (or stderr); in a pipe it is 100 columns wide, whatever the terminal is."""
    return Console(
        stderr=stderr,
        width=None if (sys.stderr if stderr else sys.stdout).isatty() else 100,
        highlight=False,
        soft_wrap=False,
    )


def number(value: float | int | None, digits: int = 4) -> str:
    """A number for people: `digits` significant digits, integers whole, "–" for None and non-finite values.

    >>> number(0.123456), number(1234567.0), number(12), number(None)
    ('0.1235', '1.235e+06', '12', '–')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    if isinstance(value, int):
        return str(value)
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 10**digits:
        return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:.{digits - 1}e}"


def plain(text: str) -> str:
    """Text of strangers, such as a run's name: what could move a terminal's cursor or colours is a sign instead.

    >>> plain("a\\x1b[31mb")
    'a\ufffd[31mb'
    """
    return "".join(sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in text)


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]] = (),
    *,
    left: Sequence[str] = (),
    digits: int = 4,
) -> Table:
    """A plain table; columns are right-aligned, those named in `left` are not.

    Args:
        columns: headings.
        rows: cells: `Text`; strings, which are text, never markup or orders to the terminal; or what `number` writes.
        left: headings of the columns that are left-aligned.
        digits: of numbers.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(
            *(
                cell if isinstance(cell, Text)
                else Text(plain(cell) if isinstance(cell, str) else number(cell, digits))
                for cell in row
            )
        )  # fmt: skip
    return table


def titled(title: str, table: Table) -> list[RenderableType]:
    """The title, which may be wider than its table, and the table under it."""
    return [Text(title, style="bold"), table]


def _bars(
    console: Console, *columns: TextColumn | BarColumn | MofNCompleteColumn | TimeRemainingColumn
) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def signal_handlers(handler: Callable[[int, FrameType | None], None], *names: str) -> Iterator[None]:
    """These signals, where the system has them, go to `handler` while the block runs."""
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handler) for number in known}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def working(description: str) -> Iterator[None]:
    """A spinner on stderr while the block runs; nothing where stderr is no terminal."""
    with _bars(make_console(stderr=True)) as progress:
        progress.add_task(description, total=None)
        yield


def step_progress(console: Console) -> Progress:
    """A bar with counts and the time left, on `console`; nothing where that is no terminal."""
    return _bars(console, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
