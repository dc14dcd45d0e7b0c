"""The last microbatch of a traced step on several ranks: exchange, then one set of global rows."""

from __future__ import annotations

import time

from loopscope.collect import health
from loopscope.collect.context import RowDict
from loopscope.collect.coverage import Coverage
from loopscope.collect.exchange import Exchanged, Local, exchange, unpack
from loopscope.collect.exchange_layout import ExchangeLayout
from loopscope.collect.pairs import Pair
from loopscope.collect.ranks import RankReducer
from loopscope.collect.rows import describe_key, step_rows
from loopscope.collect.traced_step import TracedStep, TraceResult, broken_values, of_rows
from loopscope.errors import LoopscopeError, MetricInputError, TraceError


def finish_together(
    traced: TracedStep | None,
    local: Local,
    layout: ExchangeLayout,
    reducer: RankReducer,
    *,
    want_result: bool,
) -> TraceResult | None:
    """Exchange partial vectors with all ranks, and finish the merged ones.

    Collective: every rank calls it once per traced step, whatever it saw.

    Args:
        traced: this rank's step; None where it failed as a whole.
        local: what this rank brings along.
        layout: the same on every rank.
        reducer: over the ranks that hold different tokens.
        want_result: finish the rows; without it nothing is read from the device, and the result is None.
    """
    sums, maxima = exchange(layout, local, reducer)
    if not want_result:
        return None
    began = time.perf_counter()
    merged = unpack(layout, sums, maxima)
    rows = step_rows(merged.parts)
    coverage = _coverage(layout, merged, reducer.num_ranks)
    events = [health.of_coverage(coverage), *_events(merged, reducer.num_ranks)]
    if traced is not None:
        events += traced.failures.events
        traced.seconds["finish"] = time.perf_counter() - began
    return TraceResult(
        tables=rows.tables,
        coverage=coverage,
        events=[*events, *of_rows(rows), health.of_bytes(merged.trace_bytes)],
        num_errors=len(merged.parts.failed),
        problems=(*broken_values(rows), *_problems(merged)),
    )


def _coverage(layout: ExchangeLayout, merged: Exchanged, num_ranks: int) -> Coverage:
    """A visit is covered where every microbatch of every rank saw it."""
    times = merged.num_microbatches * num_ranks
    promised = layout.expected if merged.num_stacks is None else tuple(merged.times_seen)
    missing = tuple(spec for spec in promised if merged.times_seen.get(spec, 0) < times)
    return Coverage(seen=len(promised) - len(missing), expected=len(promised), missing=missing, unexpected=())


def _events(merged: Exchanged, num_ranks: int) -> list[RowDict]:
    events = []
    if merged.failed_ranks:
        detail = f"the step failed on {merged.failed_ranks} of {num_ranks} ranks; the rows lack their tokens"
        events.append(health.event("rank_failed", "critical", count=merged.failed_ranks, detail=detail))
    if merged.depth_differs:
        detail = "ranks ran different numbers of loop steps; no rows were written, since they do not merge"
        events.append(health.event("depth_differs", "critical", detail=detail))
    if merged.unexpected:
        detail = "visits and pairs, over all ranks, that nobody promised; they are in no row"
        events.append(health.event("unexpected_visits", "critical", count=merged.unexpected, detail=detail))
    if merged.sink_faults:
        detail = "positions recorded twice, over all ranks; the first point of each was kept"
        events.append(health.event("sink_fault", "critical", count=merged.sink_faults, detail=detail))
    for key in merged.parts.failed:
        position = (key.target if isinstance(key, Pair) else key).unrolled_pos
        detail = f"{describe_key(key)}: the reduction failed on at least one rank"
        events.append(health.event("visit_failed", "critical", detail=detail, unrolled_pos=position))
    return events


def _problems(merged: Exchanged) -> list[LoopscopeError]:
    found: list[LoopscopeError] = []
    if merged.parts.failed:
        names = ", ".join(sorted(describe_key(key) for key in merged.parts.failed))
        found.append(MetricInputError(f"the reduction failed on at least one rank: {names}"))
    if merged.failed_ranks:
        found.append(TraceError(f"the traced step failed on {merged.failed_ranks} rank(s); see their logs"))
    if merged.depth_differs:
        found.append(
            TraceError("ranks ran different numbers of loop steps in one step; sample the depth alike")
        )
    if merged.unexpected:
        found.append(
            TraceError(f"{merged.unexpected} visits and pairs, over all ranks, that nobody promised")
        )
    if merged.sink_faults:
        found.append(TraceError(f"{merged.sink_faults} positions, over all ranks, were recorded twice"))
    return found
