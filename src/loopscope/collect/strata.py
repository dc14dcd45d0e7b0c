"""Probe loss by stratum: one flat mean over all tokens of all documents of a stratum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loopscope.collect.context import RowDict
from loopscope.errors import ProbeError


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCorpus:
    """What a collector must know of a probe corpus: its identity and the strata of its documents."""

    name: str
    """Name of the corpus."""
    hash: str
    """Hash over its tokens; rows of different hashes are never compared."""
    strata: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Stratum kind ("repetition", "domain") → one stratum per document, in the order of the batch."""

    def check(self, num_documents: int) -> None:
        """Raise ProbeError unless every kind names one stratum per document."""
        for kind, names in self.strata.items():
            if len(names) != num_documents:
                raise ProbeError(
                    f"corpus {self.name!r} has {len(names)} {kind} strata, but {num_documents} documents "
                    "ran; expected one stratum per document, in the order of input_ids."
                )


def loss_rows(doc_loss_sum: Sequence[float], targets_per_document: int, corpus: ProbeCorpus) -> list[RowDict]:
    """`probe_loss` rows without run-level keys.

    Args:
        doc_loss_sum: per document, the sum of its per-token losses in nats.
        targets_per_document: tokens that have a target, S − 1.
        corpus: names the strata; "all" is always there.

    A stratum with a non-finite loss has null values and the reason `nonfinite`.
    """
    corpus.check(len(doc_loss_sum))
    members: dict[tuple[str, str], list[float]] = {("all", "all"): list(doc_loss_sum)}
    for kind, names in corpus.strata.items():
        for name, value in zip(names, doc_loss_sum, strict=True):
            members.setdefault((kind, name), []).append(value)
    return [
        {
            "corpus_name": corpus.name,
            "corpus_hash": corpus.hash,
            "stratum_kind": kind,
            "stratum": name,
            "num_documents": len(values),
            "num_target_tokens": len(values) * targets_per_document,
            **_loss(values, targets_per_document),
        }
        for (kind, name), values in members.items()
    ]


def _loss(values: list[float], targets_per_document: int) -> RowDict:
    total = math.fsum(values) if all(map(math.isfinite, values)) else math.nan
    if not math.isfinite(total):
        reasons = '{"loss_mean":"nonfinite","loss_sum":"nonfinite"}'
        return {"loss_mean": None, "loss_sum": None, "null_reasons": reasons}
    count = len(values) * targets_per_document
    if count == 0:
        reasons = '{"loss_mean":"not_applicable"}'
        return {"loss_mean": None, "loss_sum": total, "null_reasons": reasons}
    return {"loss_mean": total / count, "loss_sum": total, "null_reasons": None}
