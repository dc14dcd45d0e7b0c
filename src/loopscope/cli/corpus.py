"""`loopscope corpus`: build a probe corpus from one's own texts, verify one, list those that are there."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from loopscope.cli.console import make_console, make_table
from loopscope.errors import ConfigError, ProbeError
from loopscope.probe.build import FEW_DOCUMENTS, LONG_CHARS, build_manifest, left_out
from loopscope.probe.corpus import Corpus, available_corpora, load_corpus
from loopscope.probe.manifest import MANIFEST_FILE, write_manifest
from loopscope.probe.repetition import Bucket, bucket_of, repetition_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusVerb:
    """Build, verify or list probe corpora: fixed texts that every probe runs over.

    build FOLDER writes the manifest of FOLDER/<domain>/*.txt. verify NAME-or-FOLDER checks every document
    against the manifest and shows what is in it. list names the corpora that come with loopscope.
    """

    action: Annotated[Literal["build", "verify", "list"], tyro.conf.Positional]
    """What to do."""
    corpus: Annotated[str, tyro.conf.Positional] = ""
    """Folder of the corpus; for verify also the name of one that comes with loopscope."""
    licence: tuple[str, ...] = ()
    """build: SPDX identifier of the licence of every document, or DOMAIN=IDENTIFIER for each domain."""
    description: str = ""
    """build: one line that says what the corpus is."""

    def run(self) -> int:
        """0 when built or right, 1 when a document is wrong.

        Raises:
            ConfigError: an argument is missing or wrong.
        """
        if self.action == "list":
            print(*available_corpora(), sep="\n")
            return 0
        if not self.corpus:
            raise ConfigError(
                f"corpus {self.action} needs a folder; expected `loopscope corpus {self.action} FOLDER`"
            )
        return self._build(Path(self.corpus)) if self.action == "build" else self._verify()

    def _build(self, folder: Path) -> int:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder, expected one with <domain>/*.txt in it")
        if (folder / MANIFEST_FILE).exists():
            raise ConfigError(
                f"{folder / MANIFEST_FILE} exists already; expected a new corpus, since a published one never "
                "changes. Choose another folder, or remove the manifest of an unpublished corpus."
            )
        if not self.description:
            raise ConfigError("--description is empty, expected one line that says what the corpus is")
        manifest = build_manifest(folder, licence=_licences(self.licence), description=self.description)
        try:
            write_manifest(manifest, folder)
        except OSError as error:
            raise ConfigError(
                f"cannot write {folder / MANIFEST_FILE} ({error.strerror or error}), expected a folder that can be "
                "written. Copy the documents to one."
            ) from None
        corpus = load_corpus(folder)
        _show(corpus)
        _say_what_surprises(folder, corpus)
        return 0

    def _verify(self) -> int:
        corpus = load_corpus(self.corpus)
        for document in corpus.documents:
            if document.file.partition("/")[0] != document.domain:
                raise ProbeError(
                    f"corpus {corpus.name!r}: {document.file} is in the manifest with the domain {document.domain!r}, "
                    "expected its first folder. Restore the manifest, or build another corpus."
                )
            rate = round(repetition_rate(document.text), 4)
            if rate != document.repetition_rate or bucket_of(rate) != document.repetition_bucket:
                raise ProbeError(
                    f"corpus {corpus.name!r}: {document.file} is in the manifest with repetition rate "
                    f"{document.repetition_rate} ({document.repetition_bucket}), but has {rate} "
                    f"({bucket_of(rate)}). Restore the manifest, or build another corpus."
                )
        _show(corpus)
        return 0


def _licences(given: tuple[str, ...]) -> str | dict[str, str]:
    if len(given) == 1 and given[0] and "=" not in given[0]:
        return given[0]
    pairs = dict(one.split("=", 1) for one in given if "=" in one)
    if not given or len(pairs) < len(given) or not all(pairs.values()):
        raise ConfigError(
            f"--licence is {' '.join(given)!r}, expected one SPDX identifier, such as CC0-1.0, or one per domain: "
            "prose=CC0-1.0 code=MIT"
        )
    return pairs


def _say_what_surprises(folder: Path, corpus: Corpus) -> None:
    """What a build did otherwise than its user may think."""
    if others := left_out(folder):
        some = ", ".join(str(path.relative_to(folder)) for path in others[:3])
        print(f"left out: {len(others)} file(s) that are hidden or do not end in .txt, such as {some}")
    if long := [document.file for document in corpus.documents if len(document.text) > LONG_CHARS]:
        print(
            f"long: {len(long)} document(s) above {LONG_CHARS} characters, such as {long[0]}. A probe reads the "
            "beginning alone, while the repetition bucket is of the whole: cut them to what a probe reads"
        )
    if len(corpus.documents) < FEW_DOCUMENTS:
        print(
            f"few: {len(corpus.documents)} document(s); intervals need {FEW_DOCUMENTS} at least, and say more from 50"
        )


def _show(corpus: Corpus) -> None:
    rows = []
    for domain in dict.fromkeys(document.domain for document in corpus.documents):
        members = [document for document in corpus.documents if document.domain == domain]
        buckets = Counter(document.repetition_bucket for document in members)
        rows.append(
            (
                domain,
                len(members),
                sum(len(document.text) for document in members),
                *(buckets[name] for name in get_args(Bucket)),
                ", ".join(sorted({document.licence for document in members})),
            )
        )
    make_console().print(
        make_table(
            ["domain", "documents", "characters", *get_args(Bucket), "licence"], rows, left=["domain"]
        ),
        f"{corpus.name}: {len(corpus.documents)} documents as the manifest says, texts {corpus.text_hash}",
        sep="\n",
    )
