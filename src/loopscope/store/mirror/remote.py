"""Run directories on other filesystems: sealed parts go up in the background, whole runs come down to be read.

The journal stays on the local disk: object stores cannot append. What is up is always a run that can be read:
parts appear whole, and what refers to them comes after them. What of an address can be checked is checked before
anything is written.
"""

from __future__ import annotations

import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pyarrow as pa
from pyarrow import fs

from loopscope.errors import ConfigError, NotARunError, RunExistsError
from loopscope.store.mirror.snapshot import settled
from loopscope.store.names import ATTEMPT_PART, ATTEMPTS_DIR, JOURNAL_DIR, MANIFEST, TABLES_DIR

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
            OSError: there is one, which cannot be reached now.
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
            if isinstance(first, OSError):
                # A known kind of storage: the network's or the account's fault, not the address's.
                raise first from None
            raise ConfigError(
                f"{uri!r} cannot be opened: pyarrow says {first}; fsspec says {error}. Expected a URI such as "
                "s3://bucket/folder; other schemes need fsspec and the package of their filesystem."
            ) from None
        return cls(fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path)

    def run_id(self) -> str | None:
        """The run whose copy lies there; "unknown" where its run.json says none; None where there is no run.json.

        Raises:
            OSError: the remote cannot be reached.
        """
        if not self.holds(MANIFEST):
            return None
        with self.filesystem.open_input_stream(f"{self.base}/{MANIFEST}") as stream:
            try:
                return str(msgspec.json.decode(stream.read(), type=dict[str, Any])["run_id"])
            except (msgspec.DecodeError, KeyError):
                return "unknown"

    def put(self, data: bytes, name: str) -> None:
        """Put a file at `name`: readers see it whole or not at all.

        Args:
            data: all of it, in memory: an error of the local disk must not end in half an upload that is then closed.
            name: where, relative to the run, with slashes.

        Raises:
            OSError: the filesystem refused, or did not keep all of it.
        """
        target = f"{self.base}/{name}"
        if self._is_object_store():
            self._write(target, data)
            return
        self.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        # With the journals, as on the disk: what a killed upload leaves in a table's folder breaks engines' scans.
        self.filesystem.create_dir(f"{self.base}/{JOURNAL_DIR}", recursive=True)
        temporary = f"{self.base}/{JOURNAL_DIR}/{name.rpartition('/')[2]}.{secrets.token_hex(4)}.tmp"
        self._write(temporary, data)
        self.filesystem.move(temporary, target)

    def fetch(self, folder: Path) -> None:
        """Bring the run to a local folder.

        Raises:
            NotARunError: there is none.
        """
        if not self.holds(MANIFEST):
            raise NotARunError(f"{self.base} is not a run: it has no {MANIFEST}.")
        # The copy may be growing. What refers to other files is fetched before those, as `snapshot` explains: files
        # that are uploaded in between are then more than what is referred to, and never less.
        replaced = (MANIFEST, f"{TABLES_DIR}/attempt/{ATTEMPT_PART}")
        for name in replaced:
            if self.holds(name):
                self._get(name, folder / name)
        names = [
            *self.sizes(JOURNAL_DIR),
            *settled(self.sizes(TABLES_DIR), self.sizes(TABLES_DIR)),
            *self.sizes(ATTEMPTS_DIR),
        ]
        wanted = [n for n in names if not n.endswith(".tmp") and n not in replaced]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self._get(name, folder / name), wanted))

    def sizes(self, name: str) -> dict[str, int]:
        """The files below a folder, by their names relative to the run, with their bytes; none where it is not there.

        Raises:
            OSError: the remote cannot be reached.
        """
        selector = fs.FileSelector(f"{self.base}/{name}", recursive=True, allow_not_found=True)
        prefix = self.base.lstrip("/") + "/"
        return {
            info.path.lstrip("/").removeprefix(prefix): info.size or 0
            for info in self.filesystem.get_file_info(selector)
            if info.type == fs.FileType.File
        }

    def holds(self, name: str) -> bool:
        """True where there is such a file. Raises OSError where the remote cannot be reached."""
        return bool(self.filesystem.get_file_info(f"{self.base}/{name}").type == fs.FileType.File)

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


_log = logging.getLogger("loopscope.store")

_SECRET = ("key", "secret", "token", "password", "credential", "sig")


def check_mirror(address: object) -> str:
    """The address, if it can be one; no filesystem is asked.

    Raises:
        ConfigError: it is neither a URL nor an absolute path, or it holds a secret.
    """
    if not isinstance(address, str):
        raise ConfigError(
            f"mirror is a {type(address).__name__}, expected text: a URL such as s3://bucket/runs/one"
        )
    if not address:
        return address
    parts = urlsplit(address)
    secret_names = [
        name for name, _ in parse_qsl(parts.query) if any(word in name.lower() for word in _SECRET)
    ]
    if parts.username or parts.password or secret_names:
        # The address is stored in run.json and shown in messages.
        what = f"the option {secret_names[0]!r}" if secret_names else "a user or a password"
        raise ConfigError(
            f"mirror names {what} in its address ({parts.scheme}://{parts.hostname or ''}...), expected none: run.json "
            "keeps the address. Give credentials as the storage's own tools take them, in environment variables."
        )
    if not parts.scheme and not Path(address).is_absolute():
        raise ConfigError(
            f"mirror is {address!r}, expected a URL such as s3://bucket/runs/one, or an absolute path"
        )
    return address


def refuse_mirror(address: str, root: Path, run_id: str | None) -> None:
    """Raise what `find_mirror` raises, but for a remote that cannot be reached now: that is asked again later."""
    try:
        find_mirror(address, root, run_id)
    except RunExistsError:
        raise
    except OSError as error:
        _log.warning("loopscope: %s cannot be reached yet, and is tried again (%s)", address, error)


def find_mirror(address: str, root: Path, run_id: str | None) -> Remote:
    """The remote folder, once it is known that this run may be copied there.

    Args:
        address: see `check_mirror`.
        root: the run directory, or where it is going to be.
        run_id: of the run; None where it is not made yet.

    Raises:
        ConfigError: no filesystem reads such an address, its package is missing, or it is the run directory itself.
        RunExistsError: another run lies there.
        OSError: the remote cannot be reached now.
    """
    remote = Remote.of(check_mirror(address))
    own = root.absolute().resolve()
    if isinstance(remote.filesystem, fs.LocalFileSystem):
        theirs = Path(remote.base).resolve()
        if theirs == own or own in theirs.parents or theirs in own.parents:
            raise ConfigError(f"mirror is {address!r}, expected a place apart from the run directory {own}")
    there = remote.run_id()
    if there is not None and there != run_id:
        raise RunExistsError(
            f"{address} already holds a copy of run {there}; expected no other run there. Choose another address for "
            "`mirror`, or remove that copy."
        )
    return remote
