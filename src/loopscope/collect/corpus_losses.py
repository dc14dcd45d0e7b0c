"""Probe loss by stratum: one flat mean over all tokens of all documents of a stratum."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loopscope.collect.context import RowDict
from loopscope.collect.rows import reasons
from loopscope.errors import ProbeError
from loopscope.metrics.probe.in_context import BUCKETS, bucket_index, earlier_bigrams, earlier_targets


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCorpus:
    """What a collector must know of a probe corpus: its identity and the strata of its documents."""

    name: str
    """Name of the corpus."""
    hash: str
    """Hash over its tokens; rows of different hashes are never compared."""
    strata: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Stratum kind ("repetition", "domain") → one stratum per document, in the order of the batch."""
    token_ids: NDArray[np.int64] | None = field(default=None, compare=False)
    """Token ids [documents, S], for what depends on single tokens; None leaves those rows out."""

    first_token_dropped: bool = False
    """True where the tokenizer puts a marker before every document, which was dropped."""

    def columns(self) -> RowDict:
        """What every probe row says of its corpus."""
        return {
            "corpus_name": self.name,
            "corpus_hash": self.hash,
            "first_token_dropped": self.first_token_dropped,
        }

    def check(self, num_documents: int) -> None:
        """Raise ProbeError unless every kind names one stratum per document."""
        for kind, names in self.strata.items():
            if len(names) != num_documents:
                raise ProbeError(
                    f"corpus {self.name!r} has {len(names)} {kind} strata, but {num_documents} documents "
                    "ran; expected one stratum per document, in the order of input_ids."
                )
        if self.token_ids is not None and len(self.token_ids) != num_documents:
            raise ProbeError(
                f"corpus {self.name!r} has {len(self.token_ids)} documents, but {num_documents} ran; expected "
                "the corpus that the collector was told of."
            )


def loss_rows(loss_DT: NDArray[np.float64], corpus: ProbeCorpus) -> list[RowDict]:
    """`probe_loss` rows without run-level keys: one flat mean over the tokens of each stratum.

    Args:
        loss_DT: loss in nats of every position that has a target [documents, S − 1].
        corpus: names the strata. "all" is always there; `in_context_token` and `in_context_bigram` (how often
            the target, or the pair that it ends, occurred earlier in its document) where it has token ids.

    A stratum with a non-finite loss has null values and the reason `nonfinite`; one without a token
    `not_applicable`.
    """
    documents = len(loss_DT)
    corpus.check(documents)
    rows = [_row(corpus, "all", "all", loss_DT, documents)]
    for kind, names in corpus.strata.items():
        for name in dict.fromkeys(names):
            members = [index for index, found in enumerate(names) if found == name]
            rows.append(_row(corpus, kind, name, loss_DT[members], len(members)))
    if corpus.token_ids is not None:
        for kind, counts_DT in (
            ("in_context_token", earlier_targets(corpus.token_ids)),
            ("in_context_bigram", earlier_bigrams(corpus.token_ids)),
        ):
            index_DT = bucket_index(counts_DT)
            for index, name in enumerate(BUCKETS):
                chosen_DT = index_DT == index
                rows.append(_row(corpus, kind, name, loss_DT[chosen_DT], int(chosen_DT.any(1).sum())))
    return rows


def _row(
    corpus: ProbeCorpus, kind: str, name: str, losses: NDArray[np.float64], num_documents: int
) -> RowDict:
    return {
        **corpus.columns(),
        "stratum_kind": kind,
        "stratum": name,
        "num_documents": num_documents,
        "num_target_tokens": losses.size,
        **_loss(losses),
    }


def _loss(losses: NDArray[np.float64]) -> RowDict:
    total = math.fsum(losses.ravel().tolist()) if np.isfinite(losses).all() else math.nan
    if not math.isfinite(total):
        nulls = {"loss_mean": "nonfinite", "loss_sum": "nonfinite"}
        return {"loss_mean": None, "loss_sum": None, "null_reasons": reasons(nulls)}
    if losses.size == 0:
        return {
            "loss_mean": None,
            "loss_sum": total,
            "null_reasons": reasons({"loss_mean": "not_applicable"}),
        }
    return {"loss_mean": total / losses.size, "loss_sum": total, "null_reasons": None}
