"""Every system call that can fail on a full or broken disk, in one place, so that tests can make it fail."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from loopscope.errors import ConfigError, StoreError


class Disk:
    """The local disk. All methods raise OSError."""

    def create(self, path: Path) -> int:
        """Open a new file for appending; FileExistsError where it exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes) -> int:
        """Append; returns how many bytes were taken, possibly fewer than given."""
        return os.write(fd, data)

    def overwrite(self, fd: int, data: bytes, offset: int) -> None:
        """Write over bytes that the file has already, which takes no space on most file systems."""
        if (taken := os.pwrite(fd, data, offset)) < len(data):
            raise OSError(5, f"the disk took {taken} of {len(data)} bytes")

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file back."""
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        """Make what was written survive a power failure."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing the target."""
        os.replace(source, target)  # noqa: PTH105 - every call of this class is one system call

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def mkdir(self, path: Path) -> None:
        """Make a folder, not its parents: a run that was moved is never begun anew at its old place."""
        path.mkdir(exist_ok=True)

    def fsync_dir(self, path: Path) -> None:
        """Make renames and removals in a folder survive a power failure."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


LOCAL_DISK = Disk()


def write_all(disk: Disk, fd: int, data: bytes | memoryview) -> None:
    """Write every byte, over as many calls as it takes."""
    view = memoryview(data)
    while view:
        taken = disk.write(fd, bytes(view[: 1 << 24]))
        if taken <= 0:
            raise OSError(5, "the disk wrote no byte and gave no reason")
        view = view[taken:]


def create_file(disk: Disk, path: Path, data: bytes | memoryview) -> None:
    """Put a new file in place; FileExistsError where another process was first. Removes what it left half done."""
    _fill(disk, path, data)
    disk.fsync_dir(path.parent)


def write_file(disk: Disk, path: Path, data: bytes | memoryview, temporary: Path | None = None) -> None:
    """Put a whole file in place: readers see the old content or the new, never a part of it.

    Args:
        disk: where.
        path: the file; replaced where it is there.
        data: its content.
        temporary: where it is written first, on the same filesystem; beside it where None.
    """
    if temporary is None:
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _fill(disk, temporary, data)
    try:
        disk.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    disk.fsync_dir(path.parent)


def _fill(disk: Disk, path: Path, data: bytes | memoryview) -> None:
    fd = disk.create(path)
    try:
        try:
            write_all(disk, fd, data)
            disk.fsync(fd)
        finally:
            disk.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(path)
        raise


@contextlib.contextmanager
def writing_into(root: Path) -> Iterator[None]:
    """Turns a refusal of the disk into a ConfigError that names the folder; errors of the store pass."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be written: {error.strerror or error}. Give a folder on a disk with space, which this "
            "user may write."
        ) from None
