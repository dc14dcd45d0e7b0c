"""Loads a corpus and checks every document against the manifest."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loopscope.errors import ConfigError, ProbeError
from loopscope.probe.encode import EncodedCorpus, encode_documents
from loopscope.probe.manifest import MANIFEST_FILE, DocumentEntry, read_manifest

CORPORA = Path(__file__).parent / "corpora"
"""The corpora that come with loopscope."""


class Document(DocumentEntry, frozen=True, kw_only=True):
    """One text of a corpus, and what the manifest says of it."""

    text: str
    """The text itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Fixed texts whose hashes were checked."""

    name: str
    """Name from the manifest."""
    documents: tuple[Document, ...]
    """In the order of the batch."""
    text_hash: str
    """SHA-256 over the documents' hashes: the identity of the texts, whatever the tokenizer."""

    def strata(self) -> dict[str, list[str]]:
        """Stratum kind → one stratum per document, in the documents' order."""
        return {
            "repetition": [document.repetition_bucket for document in self.documents],
            "domain": [document.domain for document in self.documents],
        }

    def encode(self, tokenizer_encode: Callable[[str], Sequence[int]], seq_len: int) -> EncodedCorpus:
        """Tokens of all documents, cut to one common length <= `seq_len`.

        Args:
            tokenizer_encode: text → token ids, such as a torchtitan tokenizer's `encode`.
            seq_len: longest length that the model takes, >= 2.

        Raises:
            ConfigError: seq_len < 2.
            ProbeError: a document has too few tokens.
        """
        return encode_documents(
            [(document.file, document.text) for document in self.documents],
            tokenizer_encode,
            seq_len,
            name=self.name,
            strata=self.strata(),
        )


def available_corpora() -> list[str]:
    """Names of the corpora that come with loopscope."""
    return sorted(path.parent.name for path in CORPORA.glob(f"*/{MANIFEST_FILE}"))


def _resolve(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if len(path.parts) == 1 and (CORPORA / path / MANIFEST_FILE).is_file():
        return CORPORA / path
    if path.is_dir():
        return path
    raise ConfigError(
        f"there is no probe corpus {str(name_or_path)!r}; expected one of {available_corpora()}, or the path "
        "of a folder with a manifest.json."
    )


def load_corpus(name_or_path: str | Path) -> Corpus:
    """Load a corpus by its name (`"core"`) or from a folder, and verify every hash.

    Raises:
        ConfigError: there is no such corpus.
        ProbeError: the manifest or a document is missing, changed, or not UTF-8.
    """
    folder = _resolve(name_or_path)
    manifest = read_manifest(folder)
    digest = hashlib.sha256()
    found = []
    for entry in manifest.documents:
        path = folder / entry.file
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ProbeError(
                f"corpus {manifest.name!r}: cannot read {path} ({error.strerror or error}); expected every "
                "document of the manifest. Restore the file."
            ) from None
        if (actual := hashlib.sha256(raw).hexdigest()) != entry.sha256:
            raise ProbeError(
                f"corpus {manifest.name!r}: {entry.file} has SHA-256 {actual}, expected {entry.sha256}. A "
                "corpus never changes, since its rows would no longer compare: restore the file, or build "
                "another corpus."
            )
        digest.update(f"{entry.file} {actual}\n".encode())
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProbeError(
                f"corpus {manifest.name!r}: {entry.file} is not UTF-8 (byte {error.start}); expected UTF-8 "
                "text."
            ) from None
        found.append(Document(text=text, **msgspec.structs.asdict(entry)))
    return Corpus(name=manifest.name, documents=tuple(found), text_hash=digest.hexdigest())
