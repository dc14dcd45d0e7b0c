"""Documents to tokens of one common length, with a hash that says which tokens a row is about."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loopscope.errors import ConfigError, ProbeError

MIN_TOKENS = 32
"""A document of fewer tokens (or fewer than the sequence length, where that is smaller) is refused."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedCorpus:
    """The tokens of a corpus under one tokenizer."""

    name: str
    """Name of the corpus."""
    input_ids: npt.NDArray[np.int64]
    """Token ids [D, S]; int64; read-only. D documents of S tokens each."""
    corpus_hash: str
    """SHA-256 over the shape and the token ids, in hexadecimal. Rows with different hashes never compare."""
    strata: Mapping[str, Sequence[str]]
    """Stratum kind ("repetition", "domain") → one stratum per document, in the order of `input_ids`."""
    dropped_first_token: bool
    """True where the tokenizer puts a marker before every text; it was dropped from each document alike."""

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ProbeError where a token id lies outside the model's vocabulary."""
        if (largest := int(self.input_ids.max())) >= vocab_size:
            raise ProbeError(
                f"corpus {self.name!r} has token id {largest}, but the model's vocabulary has {vocab_size} "
                "tokens; expected ids below that. The tokenizer belongs to another model: encode with the "
                "model's own."
            )


def token_hash(input_ids: npt.NDArray[np.int64]) -> str:
    """SHA-256 (hexadecimal) over the shape and the little-endian int64 ids of `input_ids` [D, S]."""
    digest = hashlib.sha256(f"int64 {input_ids.shape[0]} {input_ids.shape[1]}\n".encode())
    digest.update(np.ascontiguousarray(input_ids, dtype="<i8").tobytes())
    return digest.hexdigest()


def _token_ids(encoded: object, document: str) -> list[int]:
    try:
        found = [int(token) for token in encoded]  # type: ignore[attr-defined]  # what it is stands to be seen
    except (TypeError, ValueError):
        raise ProbeError(
            f"the tokenizer gave {type(encoded).__name__} for document {document!r}, expected a flat sequence of token "
            "ids. Hand over a function that returns them, such as `lambda text: tokenizer.encode(text).ids`."
        ) from None
    if found and min(found) < 0:
        raise ProbeError(
            f"the tokenizer gave token id {min(found)} for document {document!r}, expected ids from 0 on"
        )
    return found


def encode_documents(
    texts: Sequence[tuple[str, str]],
    tokenizer_encode: Callable[[str], Sequence[int]],
    seq_len: int,
    *,
    name: str,
    strata: Mapping[str, Sequence[str]],
) -> EncodedCorpus:
    """Encode (name, text) pairs, all cut to the shortest length, at most `seq_len`; see `Corpus.encode`."""
    if seq_len < 2:
        raise ConfigError(
            f"seq_len is {seq_len}, expected >= 2: a single token has no next token to predict."
        )
    tokens = [_token_ids(tokenizer_encode(text), document) for document, text in texts]
    # What a tokenizer returns for empty text is what it adds to every text.
    marker = list(tokenizer_encode(""))[:1]
    dropped = bool(marker) and all(ids[:1] == marker for ids in tokens)
    tokens = [ids[1:] if dropped else ids for ids in tokens]
    needed = min(seq_len, MIN_TOKENS)
    for (document, _), ids in zip(texts, tokens, strict=True):
        if len(ids) < needed:
            raise ProbeError(
                f"corpus {name!r}: document {document!r} has {len(ids)} tokens, expected at least {needed}. "
                "All documents are cut to one length, so a short one would cut them all: lengthen or remove "
                "it."
            )
    length = min(seq_len, *(len(ids) for ids in tokens))
    input_ids = np.array([ids[:length] for ids in tokens], dtype=np.int64)
    if len(input_ids) > 1 and (input_ids == input_ids[0]).all():
        raise ProbeError(
            f"corpus {name!r}: all {len(input_ids)} documents have the same {length} tokens, expected texts that "
            "differ. The tokenizer may know none of their words: encode with the model's own."
        )
    input_ids.setflags(write=False)
    return EncodedCorpus(
        name=name,
        input_ids=input_ids,
        corpus_hash=token_hash(input_ids),
        strata={kind: list(names) for kind, names in strata.items()},
        dropped_first_token=dropped,
    )
