"""Finds and reads the text a run trains on: the standard library's sources, or the user's own files."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loopscope.errors import ConfigError

STDLIB_MAX_BYTES = 4_000_000
"""How much of the standard library is used: about a million tokens, many times what a demo reads."""

MAX_DOCUMENT_CHARS = 16_384
"""Longer files become several documents: the data loader carries a document's rest in every checkpoint."""

MIN_CHARS = 256
"""Less text than this cannot train anything."""

_TARGET_DOCUMENTS = 64

# Tests and vendored code are not everywhere the same; encodings/ is tables of code points, hardly text.
_STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "encodings", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of the training text."""

    name: str
    """Its path relative to the root, with forward slashes; part of the content hash."""
    text: str
    """Its content, decoded as UTF-8."""


def _shuffle_key(name: str) -> str:
    # An order that mixes topics, and is the same on every machine: a rank reads a contiguous share of it.
    return hashlib.sha256(name.encode()).hexdigest()


def stdlib_files(max_bytes: int = STDLIB_MAX_BYTES, root: Path | None = None) -> list[SourceFile]:
    """The Python standard library's sources (with their docstrings), without tests and installed packages.

    Files come in a fixed mixed order until `max_bytes` are reached; the same Python gives the same list.

    Raises:
        ConfigError: this Python has no readable sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _STDLIB_SKIPPED and not name.startswith("config-")
        ]
        names += [
            (Path(folder) / file).relative_to(root).as_posix() for file in files if file.endswith(".py")
        ]
    found: list[SourceFile] = []
    size = 0
    for name in sorted(names, key=_shuffle_key):
        try:
            raw = (root / name).read_bytes()
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError):  # a few sources declare another encoding
            continue
        if found and text.strip() and size + len(raw) > max_bytes:
            break
        if text.strip():
            found.append(SourceFile(name=name, text=text))
            size += len(raw)
    if not found:
        raise ConfigError(
            f"the Python standard library at {root} holds no readable .py source; expected the sources that "
            "come with Python. Give a text of your own with --text PATH (a file or a folder)."
        )
    return found


def _text_paths(path: Path) -> list[tuple[str, Path]]:
    if path.is_file():
        return [(path.name, path)]
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [Path(folder) / file for file in files if not file.startswith(".")]
    names = [(full.relative_to(path).as_posix(), full) for full in found]
    return sorted(names, key=lambda item: _shuffle_key(item[0]))


def user_files(path: Path) -> list[SourceFile]:
    """The text at `path`: one UTF-8 file, or every file below a folder but hidden ones.

    Raises:
        ConfigError: nothing is there, it cannot be read, a file is not UTF-8 text, or it holds no text.
    """
    if not path.exists():
        raise ConfigError(f"--text {path} does not exist; expected a text file or a folder of text files.")
    found = []
    for name, full in _text_paths(path):
        try:
            text = full.read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise ConfigError(
                f"--text {path}: cannot read {full} ({error.strerror or error}); expected a "
                "readable text file. Change its permissions, or move it out of the folder."
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--text {path}: {full} is not UTF-8 text (byte {error.start}: {error.reason}); expected "
                "only text files there. Convert it to UTF-8, or move it out of the folder."
            ) from None
        if "\0" in text:
            raise ConfigError(
                f"--text {path}: {full} holds NUL bytes, so it is no text; expected UTF-8 text. Move it "
                "out of the folder."
            )
        if text.strip():
            found.append(SourceFile(name=name, text=text))
    if (chars := sum(len(file.text) for file in found)) < MIN_CHARS:
        raise ConfigError(
            f"--text {path} holds {chars} characters of text in {len(found)} non-empty file(s); expected "
            f"at least {MIN_CHARS}. Give a longer text, or none for the Python standard library's sources."
        )
    return found


def split_text(text: str, max_chars: int) -> list[str]:
    """Cut `text` into pieces of at most `max_chars` characters, after a line end where there is one.

    Joined, the pieces are the text again.
    """
    if max_chars < 1:
        raise ConfigError(f"max_chars is {max_chars}, expected >= 1.")
    pieces, start = [], 0
    while start < len(text):
        end = start + max_chars
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        pieces.append(text[start:end])
        start = end
    return pieces


def documents(files: list[SourceFile]) -> Iterator[tuple[str, str]]:
    """(name, text) of every document, in the order of training.

    A short text is cut finer, so that each of several ranks still gets a share: a rank without a document
    would wait for its first batch forever.
    """
    size = max(64, min(MAX_DOCUMENT_CHARS, sum(len(file.text) for file in files) // _TARGET_DOCUMENTS))
    for file in files:
        for number, piece in enumerate(split_text(file.text, size)):
            if piece.strip():
                yield f"{file.name}#{number}", piece
