"""A probe forward → rows of the tables probe_router, probe_overlap and probe_loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopscope.collect import health
from loopscope.collect.context import RowDict
from loopscope.collect.coverage import at_depth, compare
from loopscope.collect.pairs import loop_steps_executed
from loopscope.collect.probe_stream import LoopPair, ProbeWindow
from loopscope.collect.rows import reasons, step_rows
from loopscope.collect.step import broken_values
from loopscope.collect.strata import ProbeCorpus, loss_rows
from loopscope.errors import LoopscopeError, ProbeError
from loopscope.metrics.family import Null
from loopscope.metrics.probe.shared import COLUMNS, finish_shared
from loopscope.trace import TraceMeta, TraceSink, VisitSpec

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_OF_ONE_BATCH = {
    "maxvio_micro_mean": "maxvio_count",
    "maxvio_rank_max": "maxvio_count",
    "lb_loss_micro_mean": "lb_loss",
}
"""Columns about microbatches and ranks → the column they equal: a corpus is one batch, on one rank, however
many forwards it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """What one probe forward gives; rows without run-level keys."""

    tables: dict[str, list[RowDict]]
    """Table → rows."""
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
        sink: `unrolled_pos` → TracePoint, all documents of the corpus along the batch dimension; or a
            `ProbeWindow` that took the visits as they happened. The same numbers either way.
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
    corpus.check(per_token_loss.shape[0])
    window = ProbeWindow.of(sink, isolate=isolate)
    seen, failures = window.stream.seen(), window.failures
    parts = window.stream.finish(per_token_loss)
    rows = step_rows(parts.steps)
    corpus_columns = corpus.columns()
    router = [{**_of_one_batch(row), **corpus_columns} for row in rows.tables["router"]]
    overlap = [{**row, **corpus_columns} for row in _overlap_rows(parts.shared, router)]
    promised = at_depth(expected, meta.num_stacks)
    coverage = compare(promised, seen)
    events = [health.of_coverage(coverage, has_promise=bool(promised), event_name="probe_coverage")]
    events += [health.event("sink_fault", "critical", detail=text, count=1) for text in window.faults]
    if bad := int((~np.isfinite(parts.losses)).sum()):
        detail = f"{bad} of {parts.losses.size} target tokens have a loss that is not finite"
        events.append(health.event("nonfinite_probe_loss", "critical", count=bad, detail=detail))
    overlaps = [row["topk_overlap"] for row in overlap]
    return ProbeResult(
        tables={
            "probe_router": router,
            "probe_overlap": overlap,
            "probe_loss": loss_rows(parts.losses, corpus),
        },
        overlaps=[value for value in overlaps if isinstance(value, float)],
        events=[*events, *failures.events, *health.of_faults(rows.faults)],
        num_errors=failures.count,
        problems=tuple(broken_values(rows)),
    )


def _of_one_batch(row: RowDict) -> RowDict:
    values = {name: row[source] for name, source in _OF_ONE_BATCH.items()}
    if row.get("num_microbatches") is not None:
        values["num_microbatches"] = 1
    if row.get("filled_microbatches") is not None:
        values["filled_microbatches"] = min(1, row["filled_microbatches"])  # type: ignore[call-overload]
    return {**row, **values}


def _overlap_rows(shared: Mapping[LoopPair, NDArray[np.float64]], router: Iterable[RowDict]) -> list[RowDict]:
    """A row per pair of loop steps of a layer; null and `failed` where one of the visits is."""
    counts = {row["unrolled_pos"]: row.get("expert_count") for row in router}
    num_loop_steps = loop_steps_executed({visit for pair in shared for visit in pair})
    rows = []
    for pair, counts_m in sorted(shared.items()):
        source, target = pair
        row: RowDict = {
            "layer_idx": source.layer_idx,
            "from_loop_step": source.loop_step,
            "to_loop_step": target.loop_step,
            "from_pos": source.unrolled_pos,
            "to_pos": target.unrolled_pos,
            "num_loop_steps": num_loop_steps,
            "num_experts": target.num_experts,
            "top_k": target.top_k,
            "num_tokens": int(counts_m.sum()),
        }
        both = [counts.get(visit.unrolled_pos) for visit in pair]
        values: dict[str, float | Null]
        if None in both:
            values = dict.fromkeys(COLUMNS, Null("failed"))
        else:
            first, second = (np.asarray(count, dtype=np.float64) for count in both)
            values = finish_shared(counts_m, target.num_experts, from_count=first, to_count=second)
        nulls = {name: value.reason for name, value in values.items() if isinstance(value, Null)}
        row |= {name: None if name in nulls else value for name, value in values.items()}
        rows.append({**row, "null_reasons": reasons(nulls)})
    return rows
