"""A probe forward → rows of the tables probe_router and probe_loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopscope.collect import health
from loopscope.collect.accumulate import StepAccumulator
from loopscope.collect.context import RowDict
from loopscope.collect.coverage import at_depth, compare
from loopscope.collect.pairs import plan_overlap_pairs
from loopscope.collect.rows import step_rows
from loopscope.collect.step import Failures, broken_values
from loopscope.collect.strata import ProbeCorpus, loss_rows
from loopscope.errors import LoopscopeError, ProbeError
from loopscope.trace import TraceMeta, TraceSink, VisitSpec

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """What one probe forward gives; rows without run-level keys."""

    router: list[RowDict]
    loss: list[RowDict]
    overlaps: list[float]
    """Mean top-k overlap of every pair of loop steps of every physical layer."""
    events: list[RowDict]
    num_errors: int
    problems: tuple[LoopscopeError, ...]
    """What "raise" is loud about: broken values."""


def reduce_probe(
    sink: TraceSink,
    meta: TraceMeta,
    per_token_loss: Float[Tensor, "B S"],
    corpus: ProbeCorpus | None,
    *,
    expected: Iterable[VisitSpec],
    isolate: bool,
) -> ProbeResult:
    """Reduce one probe forward, with one transfer to the host.

    Args:
        sink: `unrolled_pos` → TracePoint, all documents of the corpus along the batch dimension.
        meta: what the model says of this forward.
        per_token_loss: [B, S] in nats, one row per document; the last position has no target and is 0.
        corpus: identity and strata of the corpus.
        expected: the promised visits, at the largest R.
        isolate: a visit whose reduction raises costs its own row only.

    Raises:
        ProbeError: there is no corpus, or it does not fit the forward.
        MetricInputError: a visit breaks its contract, and `isolate` is off.
    """
    meta.check()
    if corpus is None:
        raise ProbeError(
            "a probe ran, but the collector knows no corpus; expected its name, hash and strata. Set "
            "`collector.corpus = ProbeCorpus(...)` before the first probe."
        )
    if per_token_loss.ndim != 2 or per_token_loss.requires_grad:
        raise ProbeError(
            f"per_token_loss has shape {tuple(per_token_loss.shape)} and requires_grad="
            f"{per_token_loss.requires_grad}, expected a detached [documents, sequence] tensor."
        )
    documents, length = per_token_loss.shape
    corpus.check(documents)
    failures = Failures()
    accumulator = StepAccumulator()
    accumulator.add(sink, None, plan=plan_overlap_pairs, on_failure=failures.keep if isolate else None)
    # The last position has no target; slicing it off keeps a caller's filler out of the sum.
    document_sums = per_token_loss[:, :-1].to(torch.float64).sum(dim=1)
    seen = accumulator.seen()
    parts = accumulator.finish(extra=document_sums)
    rows = step_rows(parts)
    corpus_columns = {"corpus_name": corpus.name, "corpus_hash": corpus.hash}
    promised = at_depth(expected, meta.num_stacks)
    coverage = compare(promised, seen)
    events = [health.of_coverage(coverage, has_promise=bool(promised), event_name="probe_coverage")]
    events += [
        health.event("sink_fault", "critical", detail=text, count=1) for text in getattr(sink, "faults", ())
    ]
    overlaps = [row["topk_overlap"] for row in rows.tables["transition"]]
    return ProbeResult(
        router=[{**row, **corpus_columns} for row in rows.tables["router"]],
        loss=loss_rows(parts.extra.tolist(), length - 1, corpus),
        overlaps=[value for value in overlaps if isinstance(value, float)],
        events=[*events, *failures.events, *health.of_faults(rows.faults)],
        num_errors=failures.count,
        problems=tuple(broken_values(rows)),
    )
