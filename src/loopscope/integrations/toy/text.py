"""The toy's text, one token per character."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TEXT = """\
A lighthouse keeper counted ships. Each evening he wrote the number in a book: three ships, five ships, no
ships. When the fog came he counted bells instead, and wrote the bells down too, in another colour, so that
nobody would ever add bells to ships. A visitor asked him why he kept two colours. "Because one day," said
the keeper, "somebody will want to know how many ships there were, and the fog will not be there to ask."
The visitor looked at the book for a long time. Most pages held small numbers. One page held a very large
one. "What happened here?" asked the visitor. "Nothing," said the keeper. "That night I fell asleep, and
counted the same ship again at every turn of the lamp. I found out in the morning, because the harbour had
room for only twelve. So I wrote beside it what had gone wrong, and left the number where it was."
Years later the light was made to turn by itself, and a machine counted the ships. It never slept. It wrote
down a number every minute, and when it saw nothing it wrote nothing, and when the lens was dirty it wrote
that the lens was dirty. The keeper read its book and was content: the ships were ships, the bells were
bells, and where a number was missing there was a reason.
"""

_PROBE_DOCUMENTS = 8
_PROBE_LENGTH = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyCorpus:
    """The text as tokens: its first part to train on, its last part to probe."""

    vocab_size: int
    """Distinct characters."""
    train_ids: Tensor
    """int64 [N], in order."""
    probe_ids: Tensor
    """int64 [D, S], never trained on."""
    corpus_hash: str
    """SHA-256 over the probe's shape and tokens."""
    name: str = "toy"
    """Name of the corpus in probe rows."""
    strata: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Stratum kind → one stratum per document; the toy has none but "all"."""

    def batch(self, generator: torch.Generator, *, batch_size: int, seq_len: int) -> Tensor:
        """Random windows of the training part: int64 [batch_size, seq_len]."""
        starts = torch.randint(len(self.train_ids) - seq_len + 1, (batch_size,), generator=generator)
        return torch.stack([self.train_ids[start : start + seq_len] for start in starts.tolist()])


def load_toy_corpus() -> ToyCorpus:
    """The toy's text, split and encoded; the same on every machine."""
    alphabet = sorted(set(TEXT))
    ids = torch.tensor([alphabet.index(character) for character in TEXT])
    held_out = _PROBE_DOCUMENTS * _PROBE_LENGTH
    probe_ids = ids[-held_out:].view(_PROBE_DOCUMENTS, _PROBE_LENGTH)
    digest = hashlib.sha256(f"{list(probe_ids.shape)}{probe_ids.tolist()}".encode()).hexdigest()
    return ToyCorpus(
        vocab_size=len(alphabet), train_ids=ids[:-held_out], probe_ids=probe_ids, corpus_hash=digest
    )
