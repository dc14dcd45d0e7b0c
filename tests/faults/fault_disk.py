"""A disk that fails when it is told to: at the nth call, from the nth call on, or for a while."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from loopscope.store.disk import Disk


class FaultyDisk(Disk):
    """Fails calls `first` <= n < `last`, counted over all kinds of calls, with `code`.

    A failing write takes the first half of its bytes, as a disk does that fills up in the middle.
    """

    def __init__(self, first: int, last: int, code: int = errno.ENOSPC) -> None:
        self.first, self.last, self.code = first, last, code
        self.calls = 0
        self.armed = True

    def _fails(self) -> bool:
        if not self.armed:
            return False
        self.calls += 1
        return self.first <= self.calls < self.last

    def _error(self) -> OSError:
        return OSError(self.code, os.strerror(self.code))

    def create(self, path: Path) -> int:
        if self._fails():
            raise self._error()
        return super().create(path)

    def write(self, fd: int, data: bytes) -> int:
        if self._fails():
            half = len(data) // 2
            if half and self.calls % 2:
                return super().write(fd, data[:half])
            raise self._error()
        return super().write(fd, data)

    def truncate(self, fd: int, size: int) -> None:
        if self._fails():
            raise self._error()
        super().truncate(fd, size)

    def fsync(self, fd: int) -> None:
        if self._fails():
            raise self._error()
        super().fsync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)
        if self._fails():
            raise self._error()

    def replace(self, source: Path, target: Path) -> None:
        if self._fails():
            raise self._error()
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        if self._fails():
            raise self._error()
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        if self._fails():
            raise self._error()
        super().mkdir(path)

    def fsync_dir(self, path: Path) -> None:
        if self._fails():
            raise self._error()
        super().fsync_dir(path)
