"""Corpora: the one that comes with loopscope holds what its manifest says, and changed ones are refused."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from pathlib import Path

import pytest

from loopscope.errors import ConfigError, ProbeError
from loopscope.probe import BUCKET_EDGES, bucket_of, load_corpus, repetition_rate
from loopscope.probe.build import build_manifest
from loopscope.probe.corpus import CORPORA, available_corpora
from loopscope.probe.manifest import read_manifest, write_manifest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CORPORA / "core", tmp_path / "core"))


def test_core_is_the_folder_of_the_repository() -> None:
    assert (CORPORA / "core").resolve() == (REPOSITORY / "probes" / "core").resolve()
    assert available_corpora() == ["balanced", "core", "varied"]


def test_core_has_domains_buckets_and_licences() -> None:
    corpus = load_corpus("core")
    assert len(corpus.documents) >= 8
    assert {document.domain for document in corpus.documents} == {"prose", "code", "structured"}
    assert {document.licence for document in corpus.documents} == {"CC0-1.0"}
    assert min(Counter(document.repetition_bucket for document in corpus.documents).values()) >= 3
    assert all(len(document.text) >= 600 for document in corpus.documents)


def test_manifest_is_what_building_again_would_write() -> None:
    manifest = read_manifest(CORPORA / "core")
    again = build_manifest(CORPORA / "core", licence="CC0-1.0", description=manifest.description)
    assert again == manifest
    assert manifest.bucket_edges == BUCKET_EDGES


def test_varied_is_broad() -> None:
    corpus = load_corpus("varied")
    assert len(corpus.documents) >= 64
    assert min(Counter(document.domain for document in corpus.documents).values()) >= 20
    assert {document.licence for document in corpus.documents} == {"CC0-1.0", "PSF-2.0"}
    assert set(corpus.strata()["repetition"]) == {"low", "mid", "high"}
    assert len({document.text for document in corpus.documents}) == len(corpus.documents)


def test_balanced_has_as_many_documents_in_every_cell() -> None:
    corpus = load_corpus("balanced")
    cells = Counter((document.domain, document.repetition_bucket) for document in corpus.documents)
    domains, buckets = ("code", "prose", "structured"), ("low", "mid", "high")
    assert cells == {(domain, bucket): 12 for domain in domains for bucket in buckets}
    assert len({document.text for document in corpus.documents}) == len(corpus.documents)
    assert all(900 <= len(document.text) < 1300 for document in corpus.documents)
    licences = {
        (document.domain, document.file.startswith("prose/song")): document.licence
        for document in corpus.documents
    }
    assert licences == {
        ("code", False): "PSF-2.0",
        ("prose", False): "PSF-2.0",
        ("prose", True): "CC0-1.0",
        ("structured", False): "CC0-1.0",
    }


@pytest.mark.parametrize(
    ("name", "text_hash"),
    [
        ("balanced", "22e85fd31afaa17c782a635ef9c02bd478310784a8a48154b9f2245226cd304e"),
        ("core", "54d5e8f721783633ecbb086ff28bd8356e6d35e0327a363304eb0b9a66171753"),
        ("varied", "1a5c276a7de9c97722f15e595e57a3daacbe3dc82f1ee97e6f776b61974bcdde"),
    ],
)
def test_a_published_corpus_never_changes(name: str, text_hash: str) -> None:
    corpus = load_corpus(name)
    assert corpus.text_hash == text_hash
    for document in corpus.documents:
        assert round(repetition_rate(document.text), 4) == document.repetition_rate
        assert bucket_of(document.repetition_rate) == document.repetition_bucket


def test_text_hash_is_over_the_documents_hashes() -> None:
    corpus = load_corpus("core")
    lines = "".join(
        f"{document.file} {hashlib.sha256(document.text.encode()).hexdigest()}\n"
        for document in corpus.documents
    )
    assert corpus.text_hash == hashlib.sha256(lines.encode()).hexdigest()


def test_strata_are_plain_lists_in_document_order() -> None:
    corpus = load_corpus("core")
    strata = corpus.strata()
    assert strata["domain"] == [document.file.split("/")[0] for document in corpus.documents]
    assert strata["repetition"] == [bucket_of(document.repetition_rate) for document in corpus.documents]


def test_a_folder_is_a_corpus_too(copy: Path) -> None:
    assert load_corpus(copy).text_hash == load_corpus("core").text_hash


def test_a_changed_document_is_refused(copy: Path) -> None:
    (copy / "prose" / "soil.txt").write_text("changed " * 200)
    with pytest.raises(ProbeError, match=r"prose/soil.txt has SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        load_corpus(copy)


def test_a_missing_document_is_named(copy: Path) -> None:
    (copy / "code" / "arena.txt").unlink()
    with pytest.raises(ProbeError, match=r"cannot read .*arena\.txt"):
        load_corpus(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no readable manifest.json"),
        ("{}", "not a corpus manifest"),
        ("[", "not a corpus manifest"),
        ('{"version":9,"name":"x","description":"","bucket_edges":[0,1],"documents":[]}', "has version 9"),
        (
            '{"version":1,"name":"x","description":"","bucket_edges":[0,1],"documents":[]}',
            "lists no document",
        ),
    ],
)
def test_a_bad_manifest_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ProbeError, match=message):
        load_corpus(tmp_path)


def test_an_unknown_corpus_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no probe corpus 'cor'; expected one of \['balanced', 'core', 'varied'\]"
    ):
        load_corpus("cor")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("", 0.0),
        ("one", 0.0),
        ("a b c d", 0.0),
        ("a b a b a", 0.5),  # ab, ba, then both again
        ("x x x x x", 0.75),
        ("1, 1, 1", 0.5),  # 1-, ,-1, then both again
    ],
)
def test_repetition_rate_closed_forms(text: str, rate: float) -> None:
    assert repetition_rate(text) == rate


def test_buckets_have_their_lower_edge() -> None:
    low, high = BUCKET_EDGES
    assert [bucket_of(rate) for rate in (0.0, low - 1e-9, low, high - 1e-9, high, 1.0)] == [
        "low", "low", "mid", "mid", "high", "high",
    ]  # fmt: skip


def test_building_a_corpus_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine" / "letters").mkdir(parents=True)
    (tmp_path / "mine" / "letters" / "a.txt").write_text("dear reader " * 60)
    manifest = build_manifest(tmp_path / "mine", licence="CC0-1.0", description="mine")
    write_manifest(manifest, tmp_path / "mine")
    corpus = load_corpus(tmp_path / "mine")
    assert (corpus.name, corpus.documents[0].domain) == ("mine", "letters")


def test_a_licence_for_each_domain(tmp_path: Path) -> None:
    for domain in ("letters", "logs"):
        (tmp_path / domain).mkdir()
        (tmp_path / domain / "a.txt").write_text(f"dear {domain} " * 60)
    licences = {"letters": "CC0-1.0", "logs": "MIT"}
    manifest = build_manifest(tmp_path, licence=licences, description="")
    assert {entry.domain: entry.licence for entry in manifest.documents} == licences
    part = build_manifest(tmp_path, licence={**licences, "logs/a": "CC0-1.0", "log": "X"}, description="")
    assert [entry.licence for entry in part.documents] == ["CC0-1.0", "CC0-1.0"]
    with pytest.raises(ProbeError, match="domain 'logs' has no licence"):
        build_manifest(tmp_path, licence={"letters": "CC0-1.0"}, description="")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x" * 700, "lies in no domain folder"),
        ("d/a.txt", b"x" * 10, "has 10 characters"),
        ("d/a.txt", b"\xff" * 700, "not UTF-8"),
        ("d/a.md", b"x" * 700, "holds no document"),
    ],
)
def test_building_refuses(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProbeError, match=message):
        build_manifest(tmp_path, licence="CC0-1.0", description="")
