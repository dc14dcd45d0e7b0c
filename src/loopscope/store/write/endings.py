"""How this process ends, recorded while it does: by a signal, or by an exception that nobody caught.

A signal's record is written by its handler in C (`faulthandler`), at once, also while the training thread waits in a
collective; then the handler that was there before runs, or the system's default. Nothing about how the process ends is
changed: one that a signal kills is killed by it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from types import TracebackType

from loopscope.errors import StoreError
from loopscope.store.locks import Lock
from loopscope.store.write.bystander import Bystander

Noted = Lock | Bystander

_open: list[_Recording] = []
_previous_hook = sys.excepthook


def begin(lock: Noted) -> None:
    """Record in this lock's file how the process ends, until `end`. With several, signals go to the newest."""
    if not _open:
        _install_hook()
    _open.append(_Recording(lock))


def end(lock: Noted) -> None:
    """Stop recording for a lock."""
    for recording in [r for r in _open if r.lock is lock]:
        _open.remove(recording)
        recording.stop()
    if _open:
        _open[-1].listen()
    else:
        _remove_hook()


def check() -> None:
    """Listen again where the program has set a handler of its own meanwhile; only the main thread can."""
    if _open and threading.current_thread() is threading.main_thread():
        _open[-1].listen()


def note(lock: Noted, error: BaseException | None) -> None:
    """Record the exception with which a process ends, or closes its run; nothing where it is none.

    What was already being handled when the recording began has nothing to do with the run.
    """
    recording = next((r for r in _open if r.lock is lock), None)
    if error is None or (recording is not None and recording.handled == id(error)):
        return
    if said := _describe(error):
        with contextlib.suppress(OSError, StoreError):
            lock.note(**said, after_signal=lock.has_signal())


def _describe(error: BaseException) -> dict[str, str]:
    if isinstance(error, GeneratorExit):
        return {}
    if isinstance(error, KeyboardInterrupt):
        return {"signal": "SIGINT"}
    if isinstance(error, SystemExit):
        return {} if error.code in (None, 0) else {"error": f"SystemExit: {error.code}"}
    return {"error": f"{type(error).__name__}: {error}"}


class _Recording:
    """One lock file, and the descriptors that handlers write to."""

    def __init__(self, lock: Noted) -> None:
        self.lock = lock
        # No strong reference: an exception holds the frames that it passed, and their tensors.
        self.handled = id(sys.exception())
        self._blocks: dict[str, int] = {}
        with contextlib.suppress(OSError):
            self._blocks = lock.open_blocks()
        self.listen()

    def listen(self) -> None:
        """Have every signal's handler write to this file. What is ignored stays ignored."""
        for name, fd in self._blocks.items():
            number = signal.Signals[name]
            if signal.getsignal(number) is not signal.SIG_IGN:
                _register(number, fd)

    def stop(self) -> None:
        for name in self._blocks:
            _unregister(signal.Signals[name])
        while self._blocks:
            with contextlib.suppress(OSError):
                os.close(self._blocks.popitem()[1])


_registered: dict[int, object] = {}
"""Signal → the handler that Python knew when ours was put before it."""


def _register(number: int, fd: int) -> None:
    known = signal.getsignal(number)
    if number in _registered and _registered[number] is not known:
        if threading.current_thread() is not threading.main_thread():
            return
        # The program has set a handler since, over ours: take the old one out of faulthandler, and chain the new one.
        faulthandler.unregister(number)
        signal.signal(number, known)
    # One thread alone: walking the frames of running threads could harm a process that goes on.
    faulthandler.register(number, file=fd, all_threads=False, chain=True)
    _registered[number] = known


def _unregister(number: int) -> None:
    # Where the program has set a handler since, taking ours out would put the one before it back.
    if number in _registered and _registered[number] is signal.getsignal(number):
        faulthandler.unregister(number)
        del _registered[number]


def _install_hook() -> None:
    global _previous_hook
    if sys.excepthook is not _note_uncaught:
        _previous_hook = sys.excepthook
        sys.excepthook = _note_uncaught


def _remove_hook() -> None:
    if sys.excepthook is _note_uncaught:
        sys.excepthook = _previous_hook


def _note_uncaught(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    for recording in _open:
        note(recording.lock, error)
    _previous_hook(kind, error, frames)


def _in_child() -> None:
    """A forked child writes no rows; how it ends says nothing about the run."""
    while _open:
        _open.pop().stop()
    for number in list(_registered):
        _unregister(number)
    _remove_hook()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
