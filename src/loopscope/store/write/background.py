"""The background thread of a store: fsync and rotation by time, heartbeats, sealing."""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from loopscope.store.folder import RunFolder
from loopscope.store.names import JOURNAL_DIR
from loopscope.store.options import StoreOptions
from loopscope.store.seal.sealer import seal_all, start_sealer

Task = Callable[[], None]

_PATIENCE_S = 2.0
_AT_ONCE = 100
"""Journals per sealing process: their names must fit a command line."""


class BackgroundThread:
    """Runs tasks every `tick_s` and seals the journals that were announced. Errors are kept as text, never raised."""

    def __init__(self, folder: RunFolder, options: StoreOptions) -> None:
        self._folder, self._options = folder, options
        self._tasks: list[Task] = []
        self._waiting: list[str] = []
        self._sealing: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0
        self._mutex = threading.Lock()
        # Held while anything is being sealed or a sealer is started or ended; taken before the other one.
        self._seal_mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.on_sealed: Task = lambda: None
        """Called after something was sealed."""
        self.seal_failures = 0
        """Sealings that failed and are tried again."""
        self.last_error: str | None = None
        """Why the last task or sealing failed; text."""

    def add(self, task: Task) -> None:
        """Run `task` at every tick, from now on."""
        with self._mutex:
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="loopscope-store", daemon=True)
                self._thread.start()

    def remove(self, task: Task) -> None:
        """Stop running `task`."""
        with self._mutex, contextlib.suppress(ValueError):
            self._tasks.remove(task)

    def announce(self, journal: str) -> None:
        """A journal may be sealed. Kept in memory only: `loopscope seal` finds what was forgotten."""
        with self._mutex:
            self._waiting.append(journal)

    def take_waiting(self, prefix: str) -> list[str]:
        """Journals that were announced, start with `prefix`, and are not being sealed. Ends a running sealer."""
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
        self._end_process()

    def _end_process(self) -> None:
        """End the sealing process, which runs at idle priority; what it leaves is sealed by the caller."""
        with self._seal_mutex:
            if self._process is None:
                return
            try:
                self._process.wait(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._reap(self._process)

    def _run(self) -> None:
        while not self._stop.wait(self._options.tick_s):
            with self._mutex:
                tasks = list(self._tasks)
            for task in [*tasks, self._seal]:
                try:
                    task()
                except Exception as error:  # noqa: BLE001 - the thread must outlive every failure
                    self.last_error = f"{type(error).__name__}: {error}"

    def _seal(self) -> None:
        with self._seal_mutex:
            if self._process is not None:
                if self._process.poll() is None:
                    return
                self._reap(self._process)
            with self._mutex:
                if not self._waiting or time.monotonic() < self._not_before:
                    return
                self._sealing, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
            if self._options.seal_in == "process":
                try:
                    self._process = start_sealer(self._folder, self._sealing)
                except OSError as error:
                    self.last_error = f"the sealing process cannot be started: {error}"
                else:
                    return
            for failure in seal_all(self._folder.pinned, self._sealing):
                self.last_error = failure
            self._settle()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        killed = process.returncode == -signal.SIGKILL
        if process.returncode and not killed:
            self.last_error = f"sealing ended with status {process.returncode}"
        self._settle(killed)

    def _settle(self, killed: bool = False) -> None:
        """What is still there after a sealing failed, and is tried again later."""
        left = [n for n in self._sealing if (self._folder.pinned / JOURNAL_DIR / n).exists()]
        if left and not killed:
            self.seal_failures += len(left)
            self._not_before = time.monotonic() + self._options.retry_s
        with self._mutex:
            self._waiting += left
        self._sealing = []
        self.on_sealed()
