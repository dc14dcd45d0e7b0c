"""Reduce: the two all-reduces of a traced step, and what the merged step says.

Every rank calls `exchange` with the last microbatch of every traced step, whatever it saw: nothing, padding only, or an
error. One rank goes the same way with a reducer that does nothing.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from loopscope.collect import health
from loopscope.collect.coverage import at_depth, compare
from loopscope.collect.exchange_layout import ExchangeLayout
from loopscope.collect.pairs import Key, describe_key
from loopscope.collect.partials import StepPartials, pack, unpack
from loopscope.collect.ranks import RankReducer
from loopscope.collect.rows import StepRows, broken_values, step_rows
from loopscope.collect.traced_step import TracedStep
from loopscope.errors import MetricInputError, TraceError
from loopscope.trace import VisitSpec

_NOTHING_COUNTS = (
    "no token of the step counts, so that its metrics are null: its batches are empty, or its mask says that all of it "
    "is padding. Leave such batches out, or say which tokens count (`valid` of attach, or of on_trace_step)"
)


def exchange(
    layout: ExchangeLayout, traced: TracedStep | None, step: int, num_microbatches: int, reducer: RankReducer
) -> Tensor:
    """Fill both buffers and reduce them over ranks: exactly one SUM and one MAX, of fixed sizes. No sync.

    Args:
        layout: the same on every rank.
        traced: this rank's step; None where it failed as a whole.
        step: its number.
        num_microbatches: of the step.
        reducer: over the ranks that hold different tokens.

    Returns:
        The reduced buffers, as `unpack` takes them.
    """
    packed = partial(pack, layout, step=step, num_microbatches=num_microbatches)
    try:
        if traced is None:
            buffer = packed({}, reducer.device, failed=True)
        else:
            own = traced.accumulated
            buffer = packed(
                own.partials,
                reducer.device,
                num_stacks=traced.meta.num_stacks,
                sink_faults=len(own.sink_faults),
                trace_bytes=own.trace_bytes,
            )
    except Exception:
        if reducer.num_ranks == 1:
            raise
        buffer = packed(
            {}, reducer.device, failed=True
        )  # this rank must still take part, or the others wait for it forever
    reducer.sum(buffer[: layout.n_sum])
    reducer.max(buffer[layout.n_sum :])
    return buffer


def merged_rows(
    layout: ExchangeLayout,
    buffer: Tensor,
    traced: TracedStep | None,
    *,
    expected: Sequence[VisitSpec],
    num_ranks: int,
) -> StepRows:
    """The rows of a step that all ranks have merged, after the one transfer, and what is to be said about it.

    Args:
        layout: that of `exchange`.
        buffer: what `exchange` gave.
        traced: this rank's own step, whose texts say more than counts; None where it failed as a whole.
        expected: the promised visits, at the largest R; empty where nobody promises anything.
        num_ranks: ranks that were merged.
    """
    began = time.perf_counter()
    merged = unpack(layout, buffer)
    found = step_rows(merged)
    # A visit is covered where every microbatch of every rank saw it, and unexpected where any did.
    promised = expected if merged.num_stacks is None else at_depth(expected, merged.num_stacks)
    times = merged.num_microbatches * num_ranks
    complete = {
        visit
        for visit, seen in merged.times_seen.items()
        if seen == (traced.due(visit) if traced is not None and num_ranks == 1 else times)
    }
    unexpected = merged.times_seen.keys() - set(promised) if promised else set()
    coverage = compare(promised, complete | unexpected)
    found.coverage = coverage.ratio
    failures: dict[Key, str] = {} if traced is None else traced.accumulated.failures()
    for key in merged.failed:
        if key not in failures:
            name = describe_key(key, merged.times_seen)
            failures[key] = f"{name}: the reduction failed on at least one rank"
    found.num_errors = len(failures)
    wrong = list(_wrong(merged, [] if traced is None else traced.accumulated.sink_faults, num_ranks))
    found.events = [
        health.of_coverage(coverage, has_promise=bool(promised)),
        *(health.event(name, "critical", count=count, detail=detail) for name, count, detail in wrong),
        *health.of_failures(failures),
        *health.of_faults(found.faults),
    ]
    residual = found.tables["residual"]
    if residual and all(row.get("num_tokens") == 0 for row in residual):
        found.events.append(health.event("no_valid_token", "critical", detail=_NOTHING_COUNTS))
    found.events.append(health.of_bytes(merged.counts["trace_bytes"]))
    found.problems = list(broken_values(found))
    if failures:
        found.problems.append(MetricInputError("; ".join(failures.values())))
    if wrong:
        texts = (
            f"the window is invalid: {text}" if name == "sink_fault" else text for name, _, text in wrong
        )
        found.problems.append(TraceError("; ".join(texts)))
    if coverage.unexpected:
        found.problems.append(
            TraceError(
                f"visits that nobody promised: {list(coverage.unexpected)}; expected only {coverage.expected} "
                "visits. Make expected_visits from the configuration of the model that is being trained."
            )
        )
    if traced is not None:
        traced.seconds["finish"] = time.perf_counter() - began
    return found


def _wrong(
    merged: StepPartials, own_sink_faults: Sequence[str], num_ranks: int
) -> Iterator[tuple[str, int | None, str]]:
    """(event, count, detail) of what is wrong with the step as a whole."""
    if failed := merged.counts["failed_ranks"]:
        yield (
            "rank_failed",
            failed,
            f"the step failed on {failed} of {num_ranks} ranks; the rows lack their tokens",
        )
    if merged.depth_differs:
        text = "ranks ran different numbers of loop steps; no rows were written, since they do not merge"
        yield "depth_differs", None, text
    if merged.step_differs:
        text = "ranks ended different steps together; no rows were written. Count steps alike on every rank"
        yield "step_differs", None, text
    if unexpected := merged.counts["unexpected"]:
        text = "visits and pairs, over all ranks, that nobody promised; they are in no row"
        yield "unexpected_visits", unexpected, text
    for text in own_sink_faults:
        yield "sink_fault", 1, text
    if (others := merged.counts["sink_faults"] - len(own_sink_faults)) > 0:
        text = "positions recorded twice, over the other ranks; the first point of each was kept"
        yield "sink_fault", others, text
