"""The thread that keeps a remote copy of a run's sealed files up to date."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from loopscope.store.mirror.remote import Remote
from loopscope.store.mirror.snapshot import SealedFile, Stage, sealed_files
from loopscope.store.names import MANIFEST, TABLES_DIR
from loopscope.store.redact import redact_text

_LAST_TRIES, _LAST_WAIT_S = 6, 0.5
"""When closing: a short run may not have lived long enough for one retry, and a dead network must not hold the end."""
_STUCK_S = 60.0
"""When closing: how long one file may take before the rest is given up."""
_ENOUGH = 3
"""Failures after which the rest of a look is left for the next one: each may wait for a dead network."""
_SLOWEST = 20
"""A failing upload is tried again after `retry_s`, then twice as long, up to so many times as long."""


class Uploader:
    """Keeps the copy up to date. Errors are counted, never raised.

    Args:
        root: the run directory.
        find: gives the remote folder; asked again until it answers.
        retry_s: seconds until a failed upload is tried again, at first.
        on_failure: called from this thread with the last reason and how many uploads failed.
        only: a writer whose parts alone go up; None for everything.
    """

    def __init__(
        self,
        root: Path,
        find: Callable[[], Remote],
        *,
        retry_s: float,
        on_failure: Callable[[str, int], None],
        only: str | None = None,
    ) -> None:
        self._root, self._find, self._only = root, find, only
        self._retry_s, self._on_failure = retry_s, on_failure
        self._remote: Remote | None = None
        self._begun = False
        self._there: dict[str, int] = {}
        self._done: dict[str, tuple[int, int]] = {}
        self._wake, self._stop = threading.Event(), threading.Event()
        self._complete = False
        self.uploaded = 0
        """Files that are up."""
        self.failures = 0
        """Uploads that failed; each is tried again."""
        self.last_error: str | None = None
        self._thread = threading.Thread(target=self._run, name="loopscope-upload", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something new."""
        self._wake.set()

    def close(self) -> bool:
        """End the thread after some last tries; True where everything is up.

        Waits as long as files go up, and a minute for one that does not.
        """
        self._stop.set()
        self._wake.set()
        seen, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if self.uploaded + self.failures != seen:
                seen, since = self.uploaded + self.failures, time.monotonic()
            elif time.monotonic() - since > _STUCK_S:
                self.last_error = f"no file went up for {_STUCK_S:.0f} s"
                return False
        return self._complete

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            wait = self._retry_s
            while not self._stop.is_set() and not self._sync():
                self._stop.wait(wait)
                wait = min(2 * wait, _SLOWEST * self._retry_s)
        for left in reversed(range(_LAST_TRIES)):
            if self._sync():
                self._complete = True
                return
            if left:
                time.sleep(min(self._retry_s, _LAST_WAIT_S))

    def _sync(self) -> bool:
        """Upload what is new or changed; True where nothing is left."""
        try:
            if not self._reach():
                return False
        except Exception as error:  # noqa: BLE001 - filesystems raise what they like
            self._failed("the folder of the copy", error)
            self._tell(1)
            return False
        failed, failed_stage = 0, Stage.MANIFEST
        stopped: set[tuple[int, str] | None] = set()
        for file in sealed_files(self._root, only=self._only, begin=not self._begun):
            if self._done.get(file.name) == file.state or file.chain in stopped:
                continue  # What follows a file that is not up waits for it.
            if failed == _ENOUGH or file.stage > failed_stage:
                break  # So does what may refer to it.
            try:
                self._send(file)
            except Exception as error:  # noqa: BLE001 - the same
                failed, failed_stage = failed + 1, file.stage
                stopped.add(file.chain)
                self._failed(file.name, error)
        if failed:
            self._tell(failed)
        return not failed

    def _reach(self) -> bool:
        """False where nothing can go up before another process began the copy."""
        if self._remote is None:
            self._remote = self._find()
        there = self._remote.holds(MANIFEST)
        if self._begun and not there:
            # Going on would leave a copy without its oldest rows, which this side would take for complete.
            self._begun, self._there = False, {}
            self._done.clear()
            self._failed(self._remote.base, FileNotFoundError("the copy was removed, and is uploaded again"))
            self._tell(1)
        if there and not self._begun:
            self._there = self._remote.sizes(TABLES_DIR)
            self._begun = True
        if self._only is not None and not self._begun:
            self.last_error = (
                f"{self._remote.base} has no {MANIFEST} yet, which the run's first process puts there"
            )
            return False
        return True

    def _send(self, file: SealedFile) -> None:
        # A part never changes, and its name holds its checksum: what an earlier attempt brought up stays.
        if file.stage is not Stage.PART or self._there.get(file.name) != file.state[1]:
            assert self._remote is not None
            self._remote.put(file.content(), file.name)
        self._done[file.name] = file.state
        self._begun = self._begun or file.name == MANIFEST
        self.uploaded += 1

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        # Filesystems quote the address that they were given, keys and all.
        self.last_error = redact_text(f"{what}: {type(error).__name__}: {error}")

    def _tell(self, count: int) -> None:
        with contextlib.suppress(Exception):  # A full disk here must not end the uploads.
            self._on_failure(self.last_error or "", count)
