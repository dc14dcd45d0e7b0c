"""Run directories on other filesystems: sealed parts go up in the background, whole runs come down to be read.

The journal stays on the local disk: object stores cannot append. What is up is always a run that can be read:
parts appear whole, and what refers to them comes after them.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from loopscope.errors import ConfigError, NotARunError
from loopscope.store.names import ATTEMPT_PART, ATTEMPTS_DIR, JOURNAL_DIR, MANIFEST, TABLES_DIR, parse_part

# Where a finished write appears at once and whole; anywhere else a temporary name and a rename do the same.
_OBJECT_STORES = ("s3", "gs", "gcs", "abfs", "az")


class Remote:
    """A folder on a pyarrow filesystem (or an fsspec one, wrapped)."""

    def __init__(self, filesystem: fs.FileSystem, base: str) -> None:
        self.filesystem = filesystem
        self.base = base.rstrip("/")

    @classmethod
    def of(cls, uri: str, filesystem: object = None) -> Remote:
        """The folder that a URI names.

        Args:
            uri: such as ``s3://bucket/runs/one``; a path where `filesystem` is given.
            filesystem: a pyarrow or fsspec filesystem; found from the URI where None.

        Raises:
            ConfigError: there is no filesystem for the URI.
        """
        if filesystem is None:
            try:
                return cls(*fs.FileSystem.from_uri(uri))
            except (pa.ArrowException, ValueError, OSError) as error:
                return cls._of_fsspec(uri, error)
        if isinstance(filesystem, fs.FileSystem):
            return cls(filesystem, uri)
        return cls(fs.PyFileSystem(fs.FSSpecHandler(filesystem)), uri)

    @classmethod
    def _of_fsspec(cls, uri: str, first: Exception) -> Remote:
        try:
            filesystem, path = import_module("fsspec.core").url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{uri!r} cannot be opened: pyarrow says {first}; fsspec says {error}. Expected a URI such as "
                "s3://bucket/folder; other schemes need fsspec and the package of their filesystem."
            ) from None
        return cls(fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path)

    def put(self, source: Path, name: str) -> None:
        """Put a local file at `name`: readers see it whole or not at all.

        Raises:
            OSError: the filesystem refused, or did not keep all of it.
        """
        # All of it in memory first: an error of the local disk must not end in half an upload that is then closed.
        data = source.read_bytes()
        target = f"{self.base}/{name}"
        if self._is_object_store():
            self._write(target, data)
            return
        self.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        temporary = f"{target}.{secrets.token_hex(4)}.tmp"
        self._write(temporary, data)
        self.filesystem.move(temporary, target)

    def fetch(self, folder: Path) -> None:
        """Bring the run to a local folder.

        Raises:
            NotARunError: there is none.
        """
        if self.filesystem.get_file_info(f"{self.base}/{MANIFEST}").type != fs.FileType.File:
            raise NotARunError(f"{self.base} is not a run: it has no {MANIFEST}.")
        names = [MANIFEST]
        for name in (ATTEMPTS_DIR, TABLES_DIR, JOURNAL_DIR):
            selector = fs.FileSelector(f"{self.base}/{name}", recursive=True, allow_not_found=True)
            found = self.filesystem.get_file_info(selector)
            prefix = self.base.lstrip("/") + "/"
            names += [i.path.lstrip("/").removeprefix(prefix) for i in found if i.type == fs.FileType.File]
        wanted = [n for n in names if not n.endswith(".tmp")]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self._get(name, folder / name), wanted))

    def _get(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.filesystem.open_input_stream(f"{self.base}/{name}") as stream:
            target.write_bytes(stream.read())

    def _write(self, target: str, data: bytes) -> None:
        with self.filesystem.open_output_stream(target) as stream:
            stream.write(data)
        info = self.filesystem.get_file_info(target)
        if info.size is not None and info.size != len(data):
            self.filesystem.delete_file(target)
            raise OSError(f"{target} kept {info.size} of {len(data)} bytes")

    def _is_object_store(self) -> bool:
        return self.filesystem.type_name.rpartition("+")[2].removeprefix("py::") in _OBJECT_STORES


_LAST_TRIES, _LAST_WAIT_S = 6, 0.5
"""When closing: a short run may not have lived long enough for one retry, and a dead network must not hold the end."""


class Uploader:
    """A thread that keeps a remote copy of a run's sealed files up to date. Errors are counted, never raised."""

    def __init__(
        self, root: Path, remote: Remote, *, retry_s: float, on_failure: Callable[[str, int], None]
    ) -> None:
        self._root = root
        self._remote = remote
        self._retry_s = retry_s
        self._on_failure = on_failure
        self._done: dict[str, tuple[int, int]] = {}
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._mutex = threading.Lock()
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
        """End the thread after some last tries, for at most a few seconds of waiting; True where everything is up."""
        self._stop.set()
        self._wake.set()
        self._thread.join()
        for _ in range(_LAST_TRIES - 1):
            if self.sync():
                return True
            time.sleep(min(self._retry_s, _LAST_WAIT_S))
        return self.sync()

    def sync(self) -> bool:
        """Upload what is new or changed; True where nothing is left."""
        with self._mutex:
            failed = 0
            for name in _sealed_files(self._root):
                path = self._root / name
                try:
                    stat = path.stat()
                    state = (stat.st_mtime_ns, stat.st_size)
                    if self._done.get(name) == state:
                        continue
                    if failed and parse_part(path.name) is None:
                        break  # What refers to parts waits until the parts are there.
                    self._remote.put(path, name)
                except FileNotFoundError:
                    continue
                except Exception as error:  # noqa: BLE001 - filesystems raise what they like
                    failed += 1
                    self.failures += 1
                    self.last_error = f"{name}: {type(error).__name__}: {error}"
                else:
                    self._done[name] = state
                    self.uploaded += 1
        if failed:
            self._on_failure(self.last_error or "", failed)
        return not failed

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._stop.is_set() and not self.sync():
                end = time.monotonic() + self._retry_s
                while time.monotonic() < end and not self._stop.wait(min(0.2, self._retry_s)):
                    pass


def _sealed_files(root: Path) -> Iterator[str]:
    """Names of what goes up, in order: parts, what counts them, which are live, and what the run is."""
    for pattern in (f"{TABLES_DIR}/*/part-*.parquet", f"{JOURNAL_DIR}/*.sealed", f"{ATTEMPTS_DIR}/*.json"):
        for path in sorted(root.glob(pattern)):
            yield path.relative_to(root).as_posix()
    yield f"{TABLES_DIR}/attempt/{ATTEMPT_PART}"
    yield MANIFEST
