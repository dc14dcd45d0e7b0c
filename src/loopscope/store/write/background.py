"""The background thread of a store: fsync by time, heartbeats, rotation by age, sealing, uploads."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from loopscope.store.names import JOURNAL_DIR
from loopscope.store.options import StoreOptions
from loopscope.store.seal.sealer import seal_all, start_sealer

Chore = Callable[[], None]

_PATIENCE_S = 2.0
_AT_ONCE = 100
"""Journals per sealing process: their names must fit a command line."""


class BackgroundThread:
    """Runs chores every `tick_s` and seals what was announced. Errors are kept as text, never raised."""

    def __init__(self, root: Path, options: StoreOptions) -> None:
        self._root = root
        self._options = options
        self._chores: list[Chore] = []
        self._waiting: list[str] = []
        self._sealing: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._mutex = threading.Lock()
        # Held while anything is being sealed or a sealer is started or ended; taken before the other one.
        self._seal_mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.on_sealed: Chore = _nothing
        """Called after something was sealed."""
        self.seal_failures = 0
        """Sealings that failed and are tried again."""
        self.last_error: str | None = None
        """Why the last chore or sealing failed; text."""

    def add(self, chore: Chore) -> None:
        """Run `chore` at every tick, from now on."""
        with self._mutex:
            self._chores.append(chore)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="loopscope-store", daemon=True)
                self._thread.start()

    def remove(self, chore: Chore) -> None:
        """Stop running `chore`."""
        with self._mutex, contextlib.suppress(ValueError):
            self._chores.remove(chore)

    def announce(self, journal: str) -> None:
        """A journal may be sealed. Its files are the truth: forgetting this costs nothing but a later `seal`."""
        with self._mutex:
            self._waiting.append(journal)

    def take_waiting(self, prefix: str) -> list[str]:
        """Journals that were announced, start with `prefix`, and are not being sealed. Ends a running sealer."""
        with self._seal_mutex:
            self._end_process()
        with self._mutex:
            mine = [n for n in self._waiting if n.startswith(prefix)]
            self._waiting = [n for n in self._waiting if not n.startswith(prefix)]
        return mine

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=30)
        with self._seal_mutex:
            self._end_process()

    def _end_process(self) -> None:
        """Whoever closes is in a hurry, and the sealer gives way to everybody: what it leaves is sealed here."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reap()

    def _run(self) -> None:
        while not self._stop.wait(self._options.tick_s):
            with self._mutex:
                chores = list(self._chores)
            for chore in [*chores, self._seal]:
                try:
                    chore()
                except Exception as error:  # noqa: BLE001 - the thread must outlive every failure
                    self.last_error = f"{type(error).__name__}: {error}"

    def _seal(self) -> None:
        with self._seal_mutex:
            self._seal_next()

    def _seal_next(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._reap()
        now = time.monotonic()
        with self._mutex:
            if not self._waiting or now < self._not_before:
                return
            self._sealing, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
        if self._options.seal_in == "process":
            try:
                self._process = start_sealer(self._root, self._sealing)
            except OSError as error:
                self.last_error = f"the sealing process cannot be started: {error}"
            else:
                return
        failures = seal_all(self._root, self._sealing)
        if failures:
            self.last_error = failures[-1]
        self._settle()

    def _reap(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            killed = process.returncode == -signal.SIGKILL
            if process.returncode and not killed:
                self.last_error = f"sealing ended with status {process.returncode}"
            self._settle(killed)

    def _settle(self, killed: bool = False) -> None:
        """What is still there after a sealing failed, and is tried again later."""
        left = [n for n in self._sealing if (self._root / JOURNAL_DIR / n).exists()]
        if left and not killed:
            self.seal_failures += len(left)
            self._not_before = time.monotonic() + self._options.retry_s
        with self._mutex:
            self._waiting += left
        self._sealing = []
        self.on_sealed()


def _nothing() -> None: ...
