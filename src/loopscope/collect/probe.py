"""A probe forward → rows of the tables probe_router, probe_overlap and probe_loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopscope.catalog.registry import TABLES
from loopscope.collect import health
from loopscope.collect.context import RowDict
from loopscope.collect.corpus_losses import ProbeCorpus, loss_rows
from loopscope.collect.coverage import at_depth, compare
from loopscope.collect.pairs import loop_steps_executed
from loopscope.collect.probe_stream import LoopPair, ProbeWindow
from loopscope.collect.rows import StepRows, broken_values, reasons, step_rows
from loopscope.errors import ProbeError
from loopscope.metrics.family import Null
from loopscope.metrics.probe.shared import COLUMNS, finish_shared
from loopscope.trace import TraceMeta, TraceSink, VisitSpec

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# Columns about microbatches and ranks: a corpus is one batch, on one rank, however many forwards it took.
_OF_ONE_BATCH = {column.name: column.one_batch for column in TABLES["router"].columns if column.one_batch}


def reduce_probe(
    sink: TraceSink,
    meta: TraceMeta,
    per_token_loss: Float[Tensor, "B S"],
    corpus: ProbeCorpus | None,
    *,
    expected: Iterable[VisitSpec],
    isolate: bool,
) -> StepRows:
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
    accumulated = window.stream.accumulated
    seen, failures = set(accumulated.visits), accumulated.failures()
    partials, shared, losses = window.stream.finish(per_token_loss)
    found = step_rows(partials)
    corpus_columns = corpus.columns()
    router = [{**_of_one_batch(row), **corpus_columns} for row in found.tables["router"]]
    found.tables = {
        "probe_router": router,
        "probe_overlap": [{**row, **corpus_columns} for row in _overlap_rows(shared, router)],
        "probe_loss": loss_rows(losses, corpus),
    }
    promised = at_depth(expected, meta.num_stacks)
    coverage = compare(promised, seen)
    found.events = [health.of_coverage(coverage, has_promise=bool(promised), event_name="probe_coverage")]
    found.events += [health.event("sink_fault", "critical", detail=text, count=1) for text in window.faults]
    if bad := int((~np.isfinite(losses)).sum()):
        detail = f"{bad} of {losses.size} target tokens have a loss that is not finite"
        found.events.append(health.event("nonfinite_probe_loss", "critical", count=bad, detail=detail))
    found.events += [*health.of_failures(failures), *health.of_faults(found.faults)]
    found.num_errors = len(failures)
    found.problems = list(broken_values(found))
    return found


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
