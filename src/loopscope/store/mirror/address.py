"""Where the remote copy of a run goes: what of the address can be checked is checked before anything is written."""

from __future__ import annotations

import logging
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from pyarrow import fs

from loopscope.errors import ConfigError, RunExistsError
from loopscope.store.mirror.remote import Remote

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
    secrets = [name for name, _ in parse_qsl(parts.query) if any(word in name.lower() for word in _SECRET)]
    if parts.username or parts.password or secrets:
        # The address is stored in run.json and shown in messages.
        what = f"the option {secrets[0]!r}" if secrets else "a user or a password"
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
