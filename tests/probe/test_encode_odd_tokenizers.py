"""Tokenizers of one's own: what gives no token ids is said, not a traceback of numpy's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from loopscope.errors import ProbeError
from loopscope.probe import load_corpus


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (lambda text: SimpleNamespace(ids=[*text.encode()]), "the tokenizer gave SimpleNamespace"),
        (lambda text: {"input_ids": [*text.encode()]}, "the tokenizer gave dict"),
        (lambda text: [[*text.encode()]], "the tokenizer gave list"),
        (lambda text: [-1, *text.encode()], "the tokenizer gave token id -1"),
        (lambda text: [0] * 200, "all 13 documents have the same 64 tokens"),
    ],
)
def test_what_is_no_tokenizer(encode, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        load_corpus("core").encode(encode, 64)


def test_markers_at_either_end_give_the_tokens_of_none() -> None:
    corpus = load_corpus("core")
    plain = corpus.encode(lambda text: [*text.encode()], 64)
    for encode in (lambda t: [256, *t.encode()], lambda t: [256, *t.encode(), 257]):
        marked = corpus.encode(encode, 64)
        assert (marked.corpus_hash, marked.dropped_first_token) == (plain.corpus_hash, True)
    ended = corpus.encode(lambda t: [*t.encode(), 257], 64)
    assert (ended.corpus_hash, ended.dropped_first_token) == (plain.corpus_hash, False)
