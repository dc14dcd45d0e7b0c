"""What stands in the way of writing into a folder, said clearly."""

from __future__ import annotations

from pathlib import Path

from loopscope.errors import ConfigError, NotARunError, RunExistsError, StoreError
from loopscope.store.manifest import read_manifest
from loopscope.store.names import JOURNAL_DIR, MANIFEST, TABLES_DIR


def refuse_existing(root: Path) -> None:
    """Raise RunExistsError where the folder holds a run, ConfigError where it is no folder."""
    try:
        is_file = root.exists() and not root.is_dir()
    except OSError as error:  # a name that is too long, a folder on the way that may not be entered
        raise unwritable(root, error) from None
    if is_file:
        raise ConfigError(f"{root} is a file, expected a folder that does not exist or is empty")
    try:
        manifest = read_manifest(root)
    except NotARunError:
        if any((root / TABLES_DIR).glob("*/*.parquet")) or any((root / JOURNAL_DIR).glob("*.wal")):
            raise RunExistsError(
                f"{root} holds rows of a run whose {MANIFEST} is missing. Choose another folder."
            ) from None
        return
    except StoreError as error:
        raise RunExistsError(
            f"{root} holds a run that cannot be read ({error}). Choose another folder."
        ) from None
    except OSError as error:
        raise unwritable(root, error) from None
    process = manifest.process
    raise RunExistsError(
        f"{root} already holds run {manifest.run_id} ({manifest.run_name}), created by host "
        f"{process.host if process else 'unknown'}, pid {process.pid if process else 'unknown'}, started "
        f"{manifest.created.isoformat(timespec='seconds')}. Choose another folder, or resume that run."
    )


def unwritable(root: Path, error: OSError) -> ConfigError:
    """The error for a folder that the disk refuses to write."""
    return ConfigError(
        f"{root} cannot be written: {error.strerror or error}. Give a folder on a disk with space, which this user "
        "may write."
    )
