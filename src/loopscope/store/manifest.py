"""run.json: what a run is. Written whole, by temporary name and rename, with its own checksum."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from loopscope import __version__
from loopscope.errors import ConfigError, NotARunError, RunExistsError, SchemaError, StoreError
from loopscope.store.checksum import decode_document, encode_document
from loopscope.store.disk import Disk, write_file, writing_into
from loopscope.store.ids import Process, this_process, uuid7
from loopscope.store.names import JOURNAL_DIR, MANIFEST, TABLES_DIR
from loopscope.store.redact import redact

_log = logging.getLogger("loopscope.store")
_MOST_NAMED = 10


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to train the run: from a start or a resume to the next."""

    attempt: int
    """Number, from 1."""
    parent_attempt: int | None = None
    """The attempt whose checkpoint it loaded; None when it started fresh."""
    first_step: int = 1
    """First step it trains: restored step + 1."""
    world_size: int = 1
    process: Process | None = None
    """Who claimed it; None where it was found in the rows alone."""
    started: datetime | None = None
    loopscope_version: str | None = None
    torch_version: str | None = None
    python_version: str | None = None
    leaves_record: bool = False
    """True where its processes leave records of how they ended; False for attempts of older versions."""


LAYOUT = 2
"""The layout of a run directory that this version writes. 1: journals of format 1 and 2, attempts without a checksum
of the common form; refused by name."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a run and what is needed to read its rows. All plain data."""

    format: int = LAYOUT
    """Layout of the run directory."""
    run_id: str
    """UUIDv7, made once."""
    run_name: str = ""
    """For people."""
    created: datetime
    process: Process | None = None
    """Who created it; None where the manifest was rebuilt from the rows."""
    loopscope_version: str = ""
    expected_visits: list[dict[str, Any]] = []
    """The visits that the model's configuration promises, as plain VisitSpec fields, at the largest R."""
    trace_meta: dict[str, Any] | None = None
    configuration: dict[str, Any] = {}
    """Loopscope's own configuration and the trainer's, without the secrets in them."""
    redacted: list[str] = []
    """Settings whose values, or parts of them, were taken out as secrets: ``configuration.trainer.hub_token``."""
    versions: dict[str, str] = {}
    """Package → version."""
    corpora: dict[str, str] = {}
    """Probe corpus → hash."""
    null_reasons: dict[str, dict[str, str]] = {}
    """Table → column → why it is null in every row."""
    parent_run_id: str | None = None
    """The run that this one branched from."""
    parent_step: int | None = None
    """The step of that run's checkpoint."""
    schemas: dict[str, int] = {}
    """Table → newest schema version written."""
    attempts: list[Attempt] = []
    """A copy of attempts/, for people; where they differ, the folder counts."""
    rebuilt: bool = False
    """True where run.json was missing or invalid and this was rebuilt from the rows."""


_OPEN = ("configuration", "trace_meta", "versions")
"""The fields that hold what was handed over, whatever it is."""


def without_secrets(manifest: Manifest) -> Manifest:
    """The manifest with the secrets in it taken out, and named in `redacted`.

    Raises:
        StoreError: it holds something that JSON cannot hold.
    """
    try:
        fields, names = redact({name: getattr(manifest, name) for name in _OPEN})
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"run.json cannot hold the configuration: {error}. Hand over plain data: dicts, lists, text, numbers."
        ) from None
    return msgspec.structs.replace(manifest, **fields, redacted=sorted({*manifest.redacted, *names}))


def new_manifest(*, run_id: str | None = None, **fields: Any) -> Manifest:
    """The manifest of a run that this process makes now; `run_id` is made where it is None."""
    return Manifest(
        run_id=run_id or uuid7(),
        created=datetime.now(UTC),
        process=this_process(),
        loopscope_version=__version__,
        **fields,
    )


def write_manifest(disk: Disk, root: Path, manifest: Manifest) -> Manifest:
    """Put run.json in place, without the secrets in it, which the log names; gives what it says.

    Raises:
        StoreError: the configuration holds something that JSON cannot hold.
        OSError: the disk refused.
    """
    before, manifest = manifest.redacted, without_secrets(manifest)
    if names := [name for name in manifest.redacted if name not in before]:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        _log.warning(
            "loopscope: %s leaves out what looks like a secret in %d setting(s): %s%s",
            root / MANIFEST, len(names), ", ".join(names[:_MOST_NAMED]), more,
        )  # fmt: skip
    try:
        document = encode_document(_as_text(manifest), indent=2)
    except (TypeError, ValueError) as error:
        raise StoreError(f"run.json cannot hold the run's manifest: {error}. Hand over plain data.") from None
    write_file(disk, root / MANIFEST, document)
    return manifest


def _as_text(manifest: Manifest) -> Manifest:
    """The manifest with text that is no UTF-8 (a folder's name in a path) made readable."""
    fields = {name: _readable(getattr(manifest, name)) for name in ("run_name", *_OPEN)}
    return msgspec.structs.replace(manifest, **fields)


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_readable(name): _readable(item) for name, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list | tuple) else value


def read_manifest(root: Path) -> Manifest:
    """The manifest of a run directory.

    Raises:
        NotARunError: there is no run.json.
        SchemaError: the run has a layout that this version reads no more.
        StoreError: there is a run.json that cannot be read.
    """
    path = root / MANIFEST
    try:
        manifest = decode_document(path.read_bytes(), Manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise NotARunError(
            f"{root} is not a run: it has no {MANIFEST}. Give the folder that `--out` named when it was trained."
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise StoreError(
            f"{path} is not a valid run manifest: {error}. `loopscope seal` rebuilds it from the rows"
        ) from None
    if manifest.format < LAYOUT:
        raise SchemaError(
            f"{root} holds a run of layout {manifest.format}, written by loopscope {manifest.loopscope_version}; this "
            f"version reads layout {LAYOUT}. Read, resume or compact the run with the version that wrote it."
        )
    # A run of an older version kept them.
    return without_secrets(manifest)


def refuse_existing(root: Path) -> None:
    """Raise RunExistsError where the folder holds a run, ConfigError where it is no folder."""
    with writing_into(root):  # A name that is too long, a folder on the way that may not be entered.
        if root.exists() and not root.is_dir():
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
    process = manifest.process
    raise RunExistsError(
        f"{root} already holds run {manifest.run_id} ({manifest.run_name}), created by host "
        f"{process.host if process else 'unknown'}, pid {process.pid if process else 'unknown'}, started "
        f"{manifest.created.isoformat(timespec='seconds')}. Choose another folder, or resume that run."
    )
