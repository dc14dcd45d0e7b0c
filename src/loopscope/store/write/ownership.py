"""The locks of one process's part in a run: the owner's, the writers', and what it leaves where it writes no rows."""

from __future__ import annotations

import sys
from functools import partial

from loopscope.store.disk import Disk
from loopscope.store.folder import RunFolder
from loopscope.store.locks import Lock, take_lock
from loopscope.store.names import JOURNAL_DIR
from loopscope.store.options import StoreOptions
from loopscope.store.write import endings
from loopscope.store.write.bystander import Bystander


class Ownership:
    """Takes locks in a run directory, and gives back those of the run itself.

    Args:
        disk: where.
        folder: the run.
        run_id: of the run.
        options: of the store.
    """

    def __init__(self, disk: Disk, folder: RunFolder, run_id: str, options: StoreOptions) -> None:
        self._disk, self._folder, self._run_id, self._options = disk, folder, run_id, options
        self._owner: Lock | None = None
        self._bystander: Bystander | None = None
        self.unwritten = 0
        """The attempt that was claimed and has no writer of this process; 0 where there is none."""

    def lock(self, name: str, records_signals: bool = False) -> Lock:
        """A lock of this run. RunExistsError where a living process holds it; OSError where the disk refused."""
        return take_lock(
            self._disk,
            self._folder.pinned / JOURNAL_DIR,
            name,
            self._run_id,
            grace_s=self._options.grace_s,
            preempted_by=self._options.preempted_by if records_signals else None,
            where=self._folder.path,
        )

    @property
    def owns(self) -> bool:
        """True where this process owns the run."""
        return self._owner is not None

    def own(self) -> bool:
        """Own the run; False where this process does already. Raises as `lock`: somebody may have taken it over."""
        if self._owner is not None and self._owner.is_mine():
            return False
        first, self._owner = self._owner is None, self.lock("owner")
        return first

    def beat(self) -> None:
        """Show that the owner is alive."""
        if self._owner is not None:
            self._owner.beat()

    def attend(self, name: str) -> None:
        """Record an error that ends this process, which writes no rows, under attempt and name."""
        self._bystander = Bystander(partial(self.lock, name), keep=name)
        endings.begin(self._bystander)

    def end_attendance(self) -> None:
        """No more, from here on: the run is being closed."""
        bystander, self._bystander = self._bystander, None
        if bystander is not None:
            endings.note(bystander, sys.exception())
            endings.end(bystander)

    def disown(self) -> None:
        """Give the run back."""
        owner, self._owner = self._owner, None
        if owner is not None:
            # An attempt without a writer has no other record.
            owner.release(keep=f"{self.unwritten:05d}-owner" if self.unwritten else "")
