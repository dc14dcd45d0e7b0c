"""The copy of a run that is kept on another filesystem, and what of it did not go up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from loopscope.store.folder import RunFolder
from loopscope.store.mirror.remote import Remote, find_mirror
from loopscope.store.mirror.uploader import Uploader

_log = logging.getLogger("loopscope.store")


class MirroredRun:
    """Uploads what is sealed, in the background, and counts what fails.

    Args:
        folder: the run.
        run_id: of the run.
        remote: the folder of the copy, or its address.
        retry_s: seconds until a failed upload is tried again, at first.
        write: takes a health row without a step; False where there is no writer at the moment.
        only: a writer whose parts alone go up; None for everything.
    """

    def __init__(
        self,
        folder: RunFolder,
        run_id: str,
        remote: Remote | str,
        retry_s: float,
        write: Callable[[Mapping[str, object]], bool],
        only: str | None,
    ) -> None:
        find: Callable[[], Remote] = (
            partial(find_mirror, remote, folder.path, run_id) if isinstance(remote, str) else lambda: remote
        )
        self._write = write
        self._failed = 0
        self._reason = ""
        self.uploader = Uploader(folder.pinned, find, retry_s=retry_s, on_failure=self._note, only=only)

    def wake(self) -> None:
        """There may be something new."""
        self.uploader.wake()

    def tell(self) -> None:
        """Write how many uploads failed since this was last written; kept where there is no writer at the moment."""
        count = self._failed
        row = {"event": "upload_failed", "severity": "warn", "count": count, "detail": self._reason}
        if count and self._write(row):
            self._failed -= count

    def close(self) -> None:
        """End the uploads after some last tries."""
        if not self.uploader.close():
            _log.warning(
                "loopscope: not everything is uploaded (%s); run it again with `RunStore.open(path).mirror_to(...)`",
                self.uploader.last_error,
            )

    def _note(self, reason: str, count: int) -> None:
        self._failed += count
        self._reason = reason
        self.tell()
