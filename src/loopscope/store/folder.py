"""A run directory that is held open: it is followed where it is renamed, and never made anew at its old path."""

import contextlib
import os
import sys
import weakref
from pathlib import Path

from loopscope.errors import UnsupportedError

_DELETED = " (deleted)"
_F_GETPATH = 50
"""macOS: the path of a descriptor."""


class RunFolder:
    """One directory, named by a descriptor and not by a path.

    Files in it are reached through `pinned`, which leads to this directory wherever it lies by then. What takes its old
    place, another run of the same name, is never touched.
    """

    def __init__(self, path: Path) -> None:
        """Hold the directory that is there now. Raises OSError; UnsupportedError where a directory cannot be held."""
        if not hasattr(os, "O_DIRECTORY"):
            raise UnsupportedError(
                "runs are written on POSIX systems (Linux, macOS) alone: this one cannot hold a directory open while "
                "it is renamed. Train there, or in WSL; reading a run works here."
            )
        self._last = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        by_fd = Path(f"/proc/self/fd/{self.fd}")
        # A container may have another process's /proc, or none.
        self._by_fd = by_fd if _same(by_fd, self.fd) else None

    @property
    def pinned(self) -> Path:
        """A path for system calls, also of child processes that inherit `fd`. Not for people.

        Raises:
            FileNotFoundError: on a system without /proc, where the folder was deleted.
        """
        if self._by_fd is not None:
            return self._by_fd
        path = self.path
        if not _same(path, self.fd):
            raise FileNotFoundError(2, "the run directory was deleted or moved to another disk", str(path))
        return path

    @property
    def path(self) -> Path:
        """Where it lies now; where it lay last once it was deleted."""
        with contextlib.suppress(OSError, ValueError):
            found = _path_of(self.fd)
            if not str(found).endswith(_DELETED):
                self._last = found
        return self._last

    def is_gone(self) -> bool:
        """True once it was deleted: nothing that is written into it can ever be read."""
        try:
            if os.fstat(self.fd).st_nlink == 0:
                return True
            # Some file systems count no links of a directory.
            return self._by_fd is not None and str(self._by_fd.readlink()).endswith(_DELETED)
        except OSError:
            return True  # ESTALE: another host deleted it.


def _same(path: Path, fd: int) -> bool:
    try:
        there, held = path.stat(), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


def _path_of(fd: int) -> Path:
    if sys.platform == "darwin":
        import fcntl

        return Path(os.fsdecode(fcntl.fcntl(fd, _F_GETPATH, b"\0" * 1024).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{fd}").readlink()
