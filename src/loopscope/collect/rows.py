"""Host phase: the parts of one step → rows of the tables router, residual and transition.

All visits (and pairs) of one layout are finished together as arrays; rows are made from the columns at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from loopscope.catalog.registry import TABLES
from loopscope.collect.accumulate import Key, Part, StepParts
from loopscope.collect.context import RowDict
from loopscope.collect.pairs import Pair, loop_steps_executed
from loopscope.metrics import Fault, FinishedColumns, Layout, finish_pairs, finish_visits
from loopscope.trace import VisitSpec

TRACE_TABLES = ("router", "residual", "transition")

K = TypeVar("K", VisitSpec, Pair)


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
    seen = [*parts.visits, *(key for key in parts.failed if isinstance(key, VisitSpec))]
    num_loop_steps = loop_steps_executed(seen)
    router: dict[VisitSpec, RowDict] = {}
    residual: dict[VisitSpec, RowDict] = {}
    transition: dict[Pair, RowDict] = {}
    counts: dict[VisitSpec, NDArray[np.float64]] = {}
    faults: list[tuple[int, Fault]] = []
    for layout, specs, group in _by_layout(parts.visits):
        done = finish_visits(layout, *_stacked(group), score_funcs=[part.score_func for part in group])
        broken = {index for index, fault in done.faults if fault.fatal}
        faults += [(specs[index].unrolled_pos, fault) for index, fault in done.faults]
        residual_columns, router_columns = _rows(done.residual), _rows(done.router)
        for index, (spec, part) in enumerate(zip(specs, group, strict=True)):
            keys = _visit_keys(spec, num_loop_steps)
            keys["num_tokens"] = done.num_tokens[index]
            keys["num_microbatches"] = part.num_microbatches
            if done.router is None or done.counts is None:
                residual[spec] = {**keys, **residual_columns[index]}
                continue
            keys["score_func"] = part.score_func
            residual[spec] = {**keys, **residual_columns[index]}
            keys["score_space"] = part.score_space
            metrics = failed_columns("router") if index in broken else router_columns[index]
            router[spec] = {**keys, **metrics}
            counts[spec] = done.counts[index]
    for layout, pairs, group in _by_layout(parts.pairs):
        sides: dict[str, Any] = {}
        if layout.num_experts:
            unknown = np.full(layout.num_experts, np.nan)
            sides["from_count"] = np.stack([counts.get(pair.source, unknown) for pair in pairs])
            sides["to_count"] = np.stack([counts.get(pair.target, unknown) for pair in pairs])
        finished = finish_pairs(layout, *_stacked(group), **sides)
        faults += [(pairs[index].target.unrolled_pos, fault) for index, fault in finished.faults]
        for index, (pair, part, row) in enumerate(zip(pairs, group, _rows(finished.transition), strict=True)):
            transition[pair] = {
                **_pair_keys(pair, num_loop_steps),
                "num_tokens": finished.num_tokens[index],
                "num_microbatches": part.num_microbatches,
                **row,
            }
    for key in parts.failed:
        if isinstance(key, Pair):
            transition[key] = {**_pair_keys(key, num_loop_steps), **failed_columns("transition")}
            continue
        residual[key] = {**_visit_keys(key, num_loop_steps), **failed_columns("residual")}
        if key.num_experts:
            router[key] = {**_visit_keys(key, num_loop_steps), **failed_columns("router")}
    by_depth = sorted(transition, key=lambda pair: (pair.target.unrolled_pos, pair.kind))
    tables = {
        "router": [router[spec] for spec in sorted(router)],
        "residual": [residual[spec] for spec in sorted(residual)],
        "transition": [transition[pair] for pair in by_depth],
    }
    return StepRows(tables, sorted(faults, key=lambda each: each[0]))


def _by_layout(parts: Mapping[K, Part]) -> Iterator[tuple[Layout, list[K], list[Part]]]:
    groups: dict[Layout, list[K]] = {}
    for key, part in parts.items():
        groups.setdefault(part.layout, []).append(key)
    for layout, keys in groups.items():
        yield layout, keys, [parts[key] for key in keys]


def _stacked(group: Iterable[Part]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    group = list(group)
    return np.stack([part.sums for part in group]), np.stack([part.maxima for part in group])


def _rows(columns: FinishedColumns | None) -> list[RowDict]:
    """Metric columns and `null_reasons` as one dict per row."""
    if columns is None:
        return []
    names = (*columns.values, "null_reasons")
    texts: dict[int, str | None] = {}
    for nulls in columns.nulls:  # rows with the same nulls share one object
        if id(nulls) not in texts:
            texts[id(nulls)] = reasons(nulls)
    said = [texts[id(nulls)] for nulls in columns.nulls]
    return [
        dict(zip(names, values, strict=True)) for values in zip(*columns.values.values(), said, strict=True)
    ]


def _visit_keys(spec: VisitSpec, num_loop_steps: int) -> RowDict:
    return {
        "block": spec.block,
        "unrolled_pos": spec.unrolled_pos,
        "loop_step": _in_loop(spec, spec.loop_step),
        "layer_idx": _in_loop(spec, spec.layer_idx),
        "num_loop_steps": num_loop_steps,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
    }


def _pair_keys(pair: Pair, num_loop_steps: int) -> RowDict:
    source, target = pair.source, pair.target
    return {
        "kind": pair.kind,
        "from_pos": source.unrolled_pos,
        "to_pos": target.unrolled_pos,
        "from_loop_step": _in_loop(source, source.loop_step),
        "to_loop_step": _in_loop(target, target.loop_step),
        "from_layer_idx": _in_loop(source, source.layer_idx),
        "to_layer_idx": _in_loop(target, target.layer_idx),
        "num_loop_steps": num_loop_steps,
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
    names = TABLES[table].metrics
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
