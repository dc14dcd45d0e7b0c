"""Host phase: one step's merged partial vectors → rows of the tables router, residual and transition.

All visits (and pairs) of one layout are finished together as arrays; rows are made from the columns at the end.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.catalog.registry import TABLES
from loopscope.collect.context import RowDict
from loopscope.collect.pairs import Key, Pair, loop_steps_executed
from loopscope.collect.partials import PartialGroup, StepPartials
from loopscope.errors import LoopscopeError, MetricInputError
from loopscope.metrics import Fault, FinishedColumns, finish_pairs, finish_visits
from loopscope.trace import VisitSpec


@dataclass(slots=True)
class StepRows:
    """What one traced step or probe gives: rows without run-level keys, and what is to be said about them."""

    tables: dict[str, list[RowDict]]
    """Table → rows in order of depth."""
    faults: list[tuple[int, Fault]] = field(default_factory=list)
    """(unrolled_pos, fault) of every visit whose values broke the contract or were not finite."""
    coverage: float | None = None
    """Share of the promised visits that was seen; None where nothing was promised."""
    events: list[RowDict] = field(default_factory=list)
    """Health rows."""
    num_errors: int = 0
    """Exceptions that were kept from the training loop."""
    problems: list[LoopscopeError] = field(default_factory=list)
    """What "raise" is loud about."""


def step_rows(partials: StepPartials) -> StepRows:
    """Finish every visit and pair.

    A visit or pair whose reduction failed gets its row too: keys, and every metric null for the reason
    `failed`. So does a router row whose input broke the contract (a fatal fault): its numbers would look
    plausible and be wrong.
    """
    seen = [key for group in partials.groups for key in group.keys] + partials.failed
    num_loop_steps = loop_steps_executed(key for key in seen if isinstance(key, VisitSpec))
    tables: dict[str, list[RowDict]] = {"router": [], "residual": [], "transition": []}
    counts: dict[Key, NDArray[np.float64]] = {}
    faults: list[tuple[int, Fault]] = []
    for group in partials.groups:
        if group.layout.kind == "visit":
            _add_visits(group, num_loop_steps, tables, counts, faults)
    for group in partials.groups:
        if group.layout.kind != "visit":
            _add_pairs(group, num_loop_steps, tables, counts, faults)
    for key in partials.failed:
        keys = {name: values[0] for name, values in _keys([key], num_loop_steps).items()}
        if isinstance(key, Pair):
            tables["transition"].append({**keys, **failed_columns("transition")})
            continue
        tables["residual"].append({**keys, **failed_columns("residual")})
        if key.num_experts:
            tables["router"].append({**keys, **failed_columns("router")})
    for table, rows in tables.items():
        rows.sort(key=itemgetter("to_pos", "kind") if table == "transition" else itemgetter("unrolled_pos"))
    return StepRows(tables, sorted(faults, key=itemgetter(0)))


def _add_visits(
    group: PartialGroup,
    num_loop_steps: int,
    tables: Mapping[str, list[RowDict]],
    counts: dict[Key, NDArray[np.float64]],
    faults: list[tuple[int, Fault]],
) -> None:
    done = finish_visits(group.layout, group.sums, group.maxima, score_funcs=group.score_funcs)
    keys = _keys(group.keys, num_loop_steps)
    keys |= {"num_tokens": done.num_tokens, "num_microbatches": group.num_microbatches}
    faults += [(keys["unrolled_pos"][index], fault) for index, fault in done.faults]
    if done.router is not None and done.counts is not None:
        keys["score_func"] = group.score_funcs
        router = _rows({**keys, "score_space": group.score_spaces}, done.router)
        for index in {index for index, fault in done.faults if fault.fatal}:
            router[index] |= failed_columns("router")
        tables["router"].extend(router)
        counts.update(zip(group.keys, done.counts, strict=True))
    tables["residual"].extend(_rows(keys, done.residual))


def _add_pairs(
    group: PartialGroup,
    num_loop_steps: int,
    tables: Mapping[str, list[RowDict]],
    counts: Mapping[Key, NDArray[np.float64]],
    faults: list[tuple[int, Fault]],
) -> None:
    sides = {}
    if group.layout.num_experts:
        unknown = np.full(group.layout.num_experts, np.nan)
        for name in ("source", "target"):
            sides[name] = np.stack([counts.get(getattr(pair, name), unknown) for pair in group.keys])
    done = finish_pairs(
        group.layout, group.sums, group.maxima, from_count=sides.get("source"), to_count=sides.get("target")
    )
    keys = _keys(group.keys, num_loop_steps)
    keys |= {"num_tokens": done.num_tokens, "num_microbatches": group.num_microbatches}
    faults += [(keys["to_pos"][index], fault) for index, fault in done.faults]
    tables["transition"].extend(_rows(keys, done.transition))


def _rows(keys: Mapping[str, Sequence[Any]], columns: FinishedColumns) -> list[RowDict]:
    """Key columns, metric columns and `null_reasons` as one dict per row."""
    texts: dict[int, str | None] = {}
    for nulls in columns.nulls:  # rows with the same nulls share one object
        if id(nulls) not in texts:
            texts[id(nulls)] = reasons(nulls)
    names = (*keys, *columns.values, "null_reasons")
    said = [texts[id(nulls)] for nulls in columns.nulls]
    rows = zip(*keys.values(), *columns.values.values(), said, strict=True)
    return [dict(zip(names, values, strict=True)) for values in rows]


def _keys(keys: Sequence[Key], num_loop_steps: int) -> dict[str, Sequence[Any]]:
    """Key columns of visits, or of pairs."""
    if isinstance(keys[0], Pair):
        pairs = [key for key in keys if isinstance(key, Pair)]
        first, second = _keys([p.source for p in pairs], 0), _keys([p.target for p in pairs], 0)
        return {
            "kind": [pair.kind for pair in pairs],
            "from_pos": first["unrolled_pos"],
            "to_pos": second["unrolled_pos"],
            "from_loop_step": first["loop_step"],
            "to_loop_step": second["loop_step"],
            "from_layer_idx": first["layer_idx"],
            "to_layer_idx": second["layer_idx"],
            "num_loop_steps": [num_loop_steps] * len(pairs),
        }
    visits = [key for key in keys if isinstance(key, VisitSpec)]
    return {
        "block": [visit.block for visit in visits],
        "unrolled_pos": [visit.unrolled_pos for visit in visits],
        # Outside the loop a TracePoint carries 0/0, which is no coordinate.
        "loop_step": [visit.loop_step if visit.block == "loop" else None for visit in visits],
        "layer_idx": [visit.layer_idx if visit.block == "loop" else None for visit in visits],
        "num_loop_steps": [num_loop_steps] * len(visits),
        "num_experts": [visit.num_experts for visit in visits],
        "top_k": [visit.top_k for visit in visits],
    }


def broken_values(rows: StepRows) -> Iterator[MetricInputError]:
    """An error per visit whose values break the contract."""
    for position, fault in rows.faults:
        if fault.fatal:
            yield MetricInputError(f"unrolled_pos {position}: {fault.message}")


def rank_rows(partials: StepPartials) -> dict[str, list[RowDict]]:
    """One rank's rows beside global ones: table → rows. Of its lists a router row keeps the counts."""
    tables = step_rows(partials).tables
    for row in tables["router"]:
        lists = [name for name, value in row.items() if isinstance(value, list) and name != "expert_count"]
        text = row["null_reasons"]
        nulls = json.loads(text) if isinstance(text, str) else {}
        nulls |= dict.fromkeys(lists, "absent:rank-local rows keep counts only")
        row |= {**dict.fromkeys(lists), "null_reasons": reasons(nulls)}
    return tables


def failed_columns(table: str) -> RowDict:
    """Every metric of `table` as null for the reason `failed`."""
    names = TABLES[table].metrics
    return {**dict.fromkeys(names), "null_reasons": reasons(dict.fromkeys(names, "failed"))}


def reasons(nulls: Mapping[str, str]) -> str | None:
    """The `null_reasons` column: a JSON object in text, null where nothing is missing."""
    return json.dumps(nulls, separators=(",", ":"), sort_keys=True) if nulls else None
