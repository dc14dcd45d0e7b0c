"""The thread that keeps a remote copy of a run's sealed files up to date."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loopscope.store.names import ATTEMPT_PART, ATTEMPTS_DIR, JOURNAL_DIR, MANIFEST, TABLES_DIR, parse_part
from loopscope.store.remote import Remote

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
        on_failure: told the last reason and how many uploads failed, from this thread.
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
        self._root = root
        self._find = find
        self._remote: Remote | None = None
        self._retry_s = retry_s
        self._on_failure = on_failure
        self._only = only
        self._done: dict[str, tuple[int, int]] = {}
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._complete = False
        self.uploaded = 0
        """Files that went up."""
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
        failed = 0
        for name in _sealed_files(self._root, self._only):
            path = self._root / name
            try:
                stat = path.stat()
            except OSError:
                continue  # Not made yet, or replaced by something newer.
            state = (stat.st_mtime_ns, stat.st_size)
            if self._done.get(name) == state:
                continue
            if failed == _ENOUGH or (failed and parse_part(path.name) is None):
                break  # What refers to parts waits until the parts are there.
            try:
                if self._remote is None:
                    self._remote = self._find()
                self._remote.put(path, name)
            except Exception as error:  # noqa: BLE001 - filesystems raise what they like
                failed += 1
                self.failures += 1
                self.last_error = f"{name}: {type(error).__name__}: {error}"
            else:
                self._done[name] = state
                self.uploaded += 1
        if failed:
            with contextlib.suppress(Exception):  # A full disk here must not end the uploads.
                self._on_failure(self.last_error or "", failed)
        return not failed


def _sealed_files(root: Path, only: str | None) -> Iterator[str]:
    """Names of what goes up, in order: parts, what counts them, which are live, and what the run is."""
    writer = "*" if only is None else f"*-{only}-*"
    patterns = [f"{TABLES_DIR}/*/part-{writer}.parquet", f"{JOURNAL_DIR}/{writer}.sealed"]
    if only is None:
        patterns.append(f"{ATTEMPTS_DIR}/*.json")
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            yield path.relative_to(root).as_posix()
    if only is None:
        yield f"{TABLES_DIR}/attempt/{ATTEMPT_PART}"
        yield MANIFEST
