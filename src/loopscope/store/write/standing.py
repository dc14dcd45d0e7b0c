"""Whether what a writer writes still counts: its folder may be deleted, and its attempt superseded."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from loopscope.errors import StoreError
from loopscope.store.attempts import find_attempt, newest_attempt
from loopscope.store.folder import RunFolder
from loopscope.store.manifest import Attempt
from loopscope.store.names import ATTEMPTS_DIR, attempt_file


class Standing:
    """What a writer asks before a row, some times a second.

    Args:
        folder: the run.
        attempt: the writer's.
    """

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._folder = folder
        self._attempt = attempt
        self._next = f"{ATTEMPTS_DIR}/{attempt_file(attempt + 1)}"
        self._told = False

    @property
    def path(self) -> Path:
        """Where the folder lies, for people."""
        return self._folder.path

    def is_gone(self) -> bool:
        """True the first time that the folder is found to be deleted."""
        if self._told or not self._folder.is_gone():
            return False
        self._told = True
        return True

    def successor(self) -> Attempt | None:
        """The newest attempt that was claimed after this one; None where there is none."""
        # Numbers have no gap: while the next one is free, this attempt is the newest. One system call.
        try:
            os.stat(self._next, dir_fd=self._folder.fd)
        except OSError:
            return None
        # One that is being claimed, or whose process died in the middle of that, is not there yet.
        with contextlib.suppress(StoreError, OSError):
            newest = find_attempt(self._folder.pinned, newest_attempt(self._folder.pinned))
            return newest if newest.attempt > self._attempt else None
        return None

    def describe(self, newer: Attempt) -> str:
        """What its owner must know, in one line."""
        who = f" by host {newer.process.host}, pid {newer.process.pid}" if newer.process else ""
        return (
            f"attempt {self._attempt} of {self.path} was superseded: the run was taken over as attempt {newer.attempt}"
            f"{who}, whose rows replace this one's from step {newer.first_step} on. End this training"
        )
