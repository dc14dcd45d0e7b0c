"""How repetitive a text is, independent of any tokenizer."""

import re
from itertools import pairwise
from typing import Literal

Bucket = Literal["low", "mid", "high"]

BUCKET_EDGES = (0.15, 0.5)
"""`low` below the first, `mid` below the second, `high` from there on."""

_WORD = re.compile(r"\w+|[^\w\s]")


def repetition_rate(text: str) -> float:
    """Share of words that, with the word before them, occurred earlier in the text; in [0, 1].

    A word is a run of letters, digits and underscores, or one other visible character. The first word has no
    word before it and does not count. Text of fewer than two words has rate 0.

    >>> repetition_rate("a b a b a")
    0.5
    """
    words = _WORD.findall(text)
    seen: set[tuple[str, str]] = set()
    repeated = 0
    for pair in pairwise(words):
        if pair in seen:
            repeated += 1
        seen.add(pair)
    return repeated / (len(words) - 1) if len(words) > 1 else 0.0


def bucket_of(rate: float) -> Bucket:
    """The bucket of a repetition rate; see `BUCKET_EDGES`."""
    if rate < BUCKET_EDGES[0]:
        return "low"
    return "mid" if rate < BUCKET_EDGES[1] else "high"
