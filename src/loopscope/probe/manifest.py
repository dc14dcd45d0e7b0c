"""The manifest of a corpus: manifest.json beside its documents."""

from pathlib import Path

import msgspec

from loopscope.errors import ProbeError
from loopscope.probe.repetition import Bucket

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1


class DocumentEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One document, as the manifest fixes it."""

    file: str
    """Path relative to the corpus, with forward slashes."""
    sha256: str
    """Of the file's bytes, in hexadecimal."""
    domain: str
    """What kind of text it is: the first folder of `file`."""
    licence: str
    """SPDX identifier of the licence it is redistributed under."""
    repetition_rate: float
    """See `loopscope.probe.repetition`; four decimals."""
    repetition_bucket: Bucket
    """Fixed when the corpus is built."""


class CorpusManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a corpus but its texts."""

    version: int
    """Version of the manifest's format."""
    name: str
    """Name that rows carry as `corpus_name`."""
    description: str
    """For people."""
    bucket_edges: tuple[float, float]
    """Upper ends of the buckets low and mid."""
    documents: tuple[DocumentEntry, ...]
    """In the order of the batch."""


def read_manifest(folder: Path) -> CorpusManifest:
    """Read `folder`/manifest.json.

    Raises:
        ProbeError: it is missing, unreadable, or does not follow the format.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=CorpusManifest)
    except OSError as error:
        raise ProbeError(
            f"the corpus {folder} has no readable {MANIFEST_FILE} ({error.strerror or error}); expected a "
            "folder with a manifest and its documents. Make one with `loopscope corpus build FOLDER`."
        ) from None
    except msgspec.MsgspecError as error:
        raise ProbeError(
            f"{path} is not a corpus manifest ({error}); expected the format that "
            "`loopscope corpus build FOLDER` writes. Build it again."
        ) from None
    if manifest.version != MANIFEST_VERSION:
        raise ProbeError(
            f"{path} has version {manifest.version}, expected {MANIFEST_VERSION}. Use the loopscope that "
            "built it, or build it again."
        )
    if not manifest.documents:
        raise ProbeError(
            f"{path} lists no document, expected at least one. Add documents and build it again."
        )
    return manifest


def write_manifest(manifest: CorpusManifest, folder: Path) -> Path:
    """Write `folder`/manifest.json, indented for people and diffs, and return its path."""
    path = folder / MANIFEST_FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return path
