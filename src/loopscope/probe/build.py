"""Builds the manifest of a corpus from a folder of texts; the first folder of a document's path is its domain."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from loopscope.errors import ProbeError
from loopscope.probe.manifest import (
    MANIFEST_FILE,
    MANIFEST_VERSION,
    CorpusManifest,
    DocumentEntry,
)
from loopscope.probe.repetition import BUCKET_EDGES, bucket_of, repetition_rate

MIN_CHARS = 600
"""A document shorter than this gives too few tokens to be cut to a common length."""
LONG_CHARS = 20_000
"""From here on `loopscope corpus build` says that a probe reads a document's beginning alone."""
FEW_DOCUMENTS = 5
"""Below this a probe's rows and comparisons have no interval; what they say themselves, without importing torch."""


def build_manifest(folder: Path, *, licence: str | Mapping[str, str], description: str) -> CorpusManifest:
    """Hash and measure every `<domain>/**/*.txt` below `folder`; hidden files and folders are none of its.

    Args:
        folder: the corpus; its own name becomes the corpus's.
        licence: SPDX identifier that holds for every document, or domain → SPDX identifier; a key such as
            "prose/song" is for the documents whose path begins so.
        description: one line for people.

    Raises:
        ProbeError: a document is too short, no UTF-8 text, unreadable, the same as another, or lies in no domain
            folder; or there is none.
    """
    entries: list[DocumentEntry] = []
    first_with: dict[str, str] = {}
    for path in _documents(folder):
        if len((relative := path.relative_to(folder)).parts) < 2:
            raise ProbeError(
                f"{path} lies in no domain folder, expected {folder}/<domain>/{path.name}. Move it."
            )
        raw, text = _read(path)
        sha256, file = hashlib.sha256(raw).hexdigest(), relative.as_posix()
        if sha256 in first_with:
            raise ProbeError(
                f"{path} is the same as {first_with[sha256]}, expected documents that differ: what is there twice "
                "would count twice, and intervals would come out too narrow. Remove one."
            )
        first_with[sha256] = file
        rate = round(repetition_rate(text), 4)
        entries.append(
            DocumentEntry(
                file=file,
                sha256=sha256,
                domain=relative.parts[0],
                licence=_licence_of(file, licence),
                repetition_rate=rate,
                repetition_bucket=bucket_of(rate),
            )
        )
    if not entries:
        raise ProbeError(f"{folder} holds no document, expected files {folder}/<domain>/*.txt. Add some.")
    return CorpusManifest(
        version=MANIFEST_VERSION,
        name=folder.resolve().name,
        description=description,
        bucket_edges=BUCKET_EDGES,
        documents=tuple(entries),
    )


def left_out(folder: Path) -> list[Path]:
    """Files below `folder` that are no documents, since they are hidden or do not end in .txt."""
    known = {*_documents(folder), folder / MANIFEST_FILE}
    return sorted(path for path in folder.rglob("*") if path.is_file() and path not in known)


def _documents(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*.txt")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _read(path: Path) -> tuple[bytes, str]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ProbeError(
            f"cannot read {path} ({error.strerror or error}), expected a document. Restore or remove it."
        ) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProbeError(f"{path} is not UTF-8 (byte {error.start}), expected UTF-8. Convert it.") from None
    if "\0" in text:
        raise ProbeError(f"{path} holds NUL characters, expected text. It is no text file: remove it.")
    if (length := len(text) if text.strip() else 0) < MIN_CHARS:
        raise ProbeError(f"{path} has {length} characters, expected at least {MIN_CHARS}. Lengthen it.")
    return raw, text


def _licence_of(file: str, licence: str | Mapping[str, str]) -> str:
    if isinstance(licence, str):
        return licence
    domain = file.partition("/")[0]
    # A key with a slash names a part of a domain, such as prose/song; the longest that fits counts.
    fitting = [key for key in licence if key == domain or ("/" in key and file.startswith(key))]
    if not fitting:
        raise ProbeError(
            f"domain {domain!r} has no licence, only {sorted(licence)} have; expected one for every domain. Name "
            "its SPDX identifier too."
        )
    return licence[max(fitting, key=len)]
