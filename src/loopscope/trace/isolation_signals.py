"""Ctrl-C that arrives during a probe takes effect at its end, when everything is as it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE = 3
"""This many interrupts take effect at once instead of at the end of the probe."""


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back while the block runs, then let the handler that was there have it.

    Does nothing outside the main thread, where no signal is handled, and where the handler is not Python's.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    received = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received >= PATIENCE:
            signal.signal(signal.SIGINT, previous)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if 0 < received < PATIENCE:
            signal.raise_signal(signal.SIGINT)
