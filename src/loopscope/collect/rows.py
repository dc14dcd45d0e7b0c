"""Host phase: the parts of one step → rows of the tables router, residual and transition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loopscope.collect.accumulate import Key, Part, StepParts
from loopscope.collect.context import RowDict
from loopscope.collect.pairs import Pair, loop_steps_executed
from loopscope.metrics import REGISTRY, Fault, FinishedVisit, finish_pair, finish_visit
from loopscope.trace import VisitSpec

TRACE_TABLES = ("router", "residual", "transition")


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one traced step, without run-level keys, and what was wrong with the input."""

    tables: dict[str, list[RowDict]]
    """Table → rows in order of depth."""
    faults: list[tuple[int, Fault]] = field(default_factory=list)
    """(unrolled_pos, fault) of every visit whose values broke the contract or were not finite."""


def step_rows(parts: StepParts) -> StepRows:
    """Finish every visit and pair.

    A visit or pair whose reduction failed gets its row too: keys, and every metric null for the reason
    `failed`. So does a router row whose input broke the contract (a fatal fault): its numbers would look
    plausible and be wrong.
    """
    tables: dict[str, list[RowDict]] = {table: [] for table in TRACE_TABLES}
    found = StepRows(tables)
    seen = [*parts.visits, *(key for key in parts.failed if isinstance(key, VisitSpec))]
    num_loop_steps = loop_steps_executed(seen)
    finished = {spec: _finish_visit(part, spec, found) for spec, part in parts.visits.items()}
    for spec in sorted(seen):
        router, residual = _visit_rows(spec, parts.visits.get(spec), finished.get(spec), num_loop_steps)
        tables["residual"].append(residual)
        if router is not None:
            tables["router"].append(router)
    counts = {spec: _counts(visit) for spec, visit in finished.items()}
    pairs = [*parts.pairs, *(key for key in parts.failed if isinstance(key, Pair))]
    for pair in sorted(pairs, key=lambda pair: (pair.target.unrolled_pos, pair.kind)):
        row = _pair_row(pair, parts.pairs.get(pair), counts, found)
        tables["transition"].append({**row, "num_loop_steps": num_loop_steps})
    return found


def _finish_visit(part: Part, spec: VisitSpec, found: StepRows) -> FinishedVisit:
    visit = finish_visit(part.layout, part.sums, part.maxima, score_func=part.score_func)
    found.faults.extend((spec.unrolled_pos, fault) for fault in visit.faults)
    return visit


def _visit_rows(
    spec: VisitSpec, part: Part | None, visit: FinishedVisit | None, num_loop_steps: int
) -> tuple[RowDict | None, RowDict]:
    """The router row (None for a dense visit) and the residual row."""
    keys: RowDict = {
        "block": spec.block,
        "unrolled_pos": spec.unrolled_pos,
        "loop_step": _in_loop(spec, spec.loop_step),
        "layer_idx": _in_loop(spec, spec.layer_idx),
        "num_loop_steps": num_loop_steps,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
    }
    dense = spec.num_experts == 0
    if part is None or visit is None:
        router = None if dense else {**keys, **failed_columns("router")}
        return router, {**keys, **failed_columns("residual")}
    keys["num_tokens"] = visit.num_tokens
    keys["num_microbatches"] = part.num_microbatches
    if not dense:
        keys["score_func"] = part.score_func
    residual = {**keys, **visit.residual, "null_reasons": reasons(visit.residual_nulls)}
    if visit.router is None:
        return None, residual
    keys["score_space"] = part.score_space
    if any(fault.fatal for fault in visit.faults):
        return {**keys, **failed_columns("router")}, residual
    return {**keys, **visit.router, "null_reasons": reasons(visit.router_nulls)}, residual


def _pair_row(
    pair: Pair, part: Part | None, counts: Mapping[VisitSpec, list[int] | None], found: StepRows
) -> RowDict:
    source, target = pair.source, pair.target
    keys: RowDict = {
        "kind": pair.kind,
        "from_pos": source.unrolled_pos,
        "to_pos": target.unrolled_pos,
        "from_loop_step": _in_loop(source, source.loop_step),
        "to_loop_step": _in_loop(target, target.loop_step),
        "from_layer_idx": _in_loop(source, source.layer_idx),
        "to_layer_idx": _in_loop(target, target.layer_idx),
    }
    if part is None:
        return {**keys, **failed_columns("transition")}
    done = finish_pair(
        part.layout,
        part.sums,
        part.maxima,
        from_count=counts.get(source) if pair.same_layer else None,
        to_count=counts.get(target) if pair.same_layer else None,
    )
    found.faults.extend((target.unrolled_pos, fault) for fault in done.faults)
    return {
        **keys,
        "num_tokens": done.num_tokens,
        "num_microbatches": part.num_microbatches,
        **done.transition,
        "null_reasons": reasons(done.transition_nulls),
    }


def counts_only(row: RowDict) -> RowDict:
    """A rank-local router row beside a global one: of the list columns it keeps the counts."""
    lists = [name for name, value in row.items() if isinstance(value, list) and name != "expert_count"]
    nulls = {**_reasons_of(row), **dict.fromkeys(lists, "absent:rank-local rows keep counts only")}
    return {**row, **dict.fromkeys(lists), "null_reasons": reasons(nulls)}


def _reasons_of(row: RowDict) -> dict[str, str]:
    text = row["null_reasons"]
    return dict(json.loads(text)) if isinstance(text, str) else {}


def failed_columns(table: str) -> RowDict:
    """Every metric of `table` as null for the reason `failed`."""
    names = [name for of_table, name in REGISTRY if of_table == table]
    return {**dict.fromkeys(names), "null_reasons": reasons(dict.fromkeys(names, "failed"))}


def reasons(nulls: Mapping[str, str]) -> str | None:
    """The `null_reasons` column: a JSON object in text, null where nothing is missing."""
    return json.dumps(nulls, separators=(",", ":"), sort_keys=True) if nulls else None


def describe_key(key: Key) -> str:
    """A visit or pair in words, for error messages."""
    if isinstance(key, Pair):
        return f"{key.kind} pair {key.source.unrolled_pos} → {key.target.unrolled_pos}"
    return f"visit at unrolled_pos {key.unrolled_pos}"


def positions(keys: Iterable[VisitSpec]) -> list[int]:
    """The depths of visits, in order."""
    return sorted(key.unrolled_pos for key in keys)


def _in_loop(spec: VisitSpec, index: int) -> int | None:
    # Outside the loop a TracePoint carries 0/0, which is no coordinate.
    return index if spec.block == "loop" else None


def _counts(visit: FinishedVisit) -> list[int] | None:
    count = None if visit.router is None else visit.router.get("expert_count")
    return [int(value) for value in count] if isinstance(count, list) else None
