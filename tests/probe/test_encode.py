"""Documents become tokens of one length, with a hash that changes when any token does."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.errors import ConfigError, ProbeError
from loopscope.probe import EncodedCorpus, load_corpus
from loopscope.probe.encode import encode_documents, token_hash


def to_bytes(text: str) -> list[int]:
    return list(text.encode())


def encode(
    texts: list[str], seq_len: int = 64, encoder: Callable[[str], list[int]] = to_bytes
) -> EncodedCorpus:
    named = [(f"doc{i}", text) for i, text in enumerate(texts)]
    return encode_documents(named, encoder, seq_len, name="t", strata={"domain": ["x"] * len(texts)})


def test_all_documents_have_the_shortest_length() -> None:
    found = encode(["a" * 50, "b" * 40, "c" * 60])
    assert found.input_ids.shape == (3, 40)
    assert found.input_ids.dtype == np.int64
    assert found.input_ids[:, 0].tolist() == [97, 98, 99]


def test_the_sequence_length_is_a_bound() -> None:
    assert encode(["a" * 50, "b" * 60], seq_len=33).input_ids.shape == (2, 33)
    assert encode(["a" * 5, "b" * 4], seq_len=4).input_ids.shape == (2, 4)


def test_the_ids_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        encode(["a" * 50]).input_ids[0, 0] = 1


def test_hash_is_over_shape_and_ids() -> None:
    raw = b"int64 2 3\n" + struct.pack("<6q", 1, 2, 3, 4, 5, 6)
    assert token_hash(np.arange(1, 7, dtype=np.int64).reshape(2, 3)) == hashlib.sha256(raw).hexdigest()


@given(st.integers(0, 2), st.integers(0, 4), st.integers(1, 1000))
def test_hash_changes_with_any_token(row: int, column: int, change: int) -> None:
    ids = np.arange(15, dtype=np.int64).reshape(3, 5)
    other = ids.copy()
    other[row, column] += change
    assert token_hash(ids) != token_hash(other)
    assert token_hash(ids) != token_hash(ids.reshape(5, 3))


def test_a_marker_before_every_text_is_dropped_from_all() -> None:
    found = encode(["a" * 50, "b" * 50], encoder=lambda text: [1, *to_bytes(text)])
    assert found.dropped_first_token
    assert found.input_ids[:, 0].tolist() == [97, 98]
    assert not encode(["a" * 50]).dropped_first_token


def test_a_short_document_is_named() -> None:
    with pytest.raises(ProbeError, match="document 'doc1' has 31 tokens, expected at least 32"):
        encode(["a" * 50, "b" * 31])


def test_a_sequence_without_a_next_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="seq_len is 1, expected >= 2"):
        encode(["a" * 50], seq_len=1)


def test_a_foreign_vocabulary_is_refused() -> None:
    found = encode(["a" * 50])
    found.check_vocabulary(98)
    with pytest.raises(ProbeError, match="token id 97, but the model's vocabulary has 97"):
        found.check_vocabulary(97)


def test_core_encodes_with_its_strata() -> None:
    corpus = load_corpus("core")
    found = corpus.encode(to_bytes, 128)
    assert found.input_ids.shape == (len(corpus.documents), 128)
    assert {kind: len(names) for kind, names in found.strata.items()} == {
        "repetition": len(corpus.documents),
        "domain": len(corpus.documents),
    }
    assert found.corpus_hash == corpus.encode(to_bytes, 128).corpus_hash != corpus.text_hash
