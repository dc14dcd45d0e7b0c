"""Which rows speak for a run, and what a visit is called."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from loopscope.catalog.gauge import Columns, as_floats

T = TypeVar("T")

SCOPE = ("step", "aggregation_scope", "rank")
"""The columns that say whose a row is."""

BLOCKS = ("head", "loop", "tail")
"""In the order of depth."""

VISIT = ("block", "unrolled_pos", "loop_step", "layer_idx")
"""The columns that say which visit a row is about."""

VISIT_INDEX = (
    "case when block = 'tail' then dense_rank() over (partition by step, block order by unrolled_pos) - 1 "
    "else unrolled_pos end"
)
"""`index` of `visit_label` as SQL, over whole steps of a table with `VISIT`."""


def speaking(columns: Columns, lowest: float | None = None) -> NDArray[np.bool_]:
    """True for the rows of one table that stand for the run.

    At a step with global rows these alone; at any other step the rows of the lowest rank. Rows of different scopes
    never mix within a step, and rows of one rank are never averaged with those of another.

    Args:
        columns: `SCOPE` of every row, [n] each.
        lowest: the lowest rank of the table's rank-local rows, where `columns` may be a part of it; None: of these.
    """
    step = np.asarray(columns["step"], dtype=np.int64)
    is_global: NDArray[np.bool_] = np.asarray(columns["aggregation_scope"], dtype=object) == "global"
    rank = as_floats(columns["rank"])
    own = ~is_global & ~np.isin(step, step[is_global])
    if lowest is None:
        ranks = rank[~is_global & ~np.isnan(rank)]
        lowest = float(ranks.min()) if len(ranks) else 0.0
    # A row without a rank is of a run that recorded none.
    found: NDArray[np.bool_] = is_global | (own & (np.isnan(rank) | (rank == lowest)))
    return found


def speaking_sql(table: str, *, any_global: bool, any_local: bool, lowest: int | None) -> str:
    """`speaking` as an SQL condition over `table`.

    Args:
        table: the table or view that the condition is used with.
        any_global: the table has global rows.
        any_local: the table has other rows, at a step without global ones; where that is not known, other rows.
        lowest: the lowest rank of its other rows; None where none has a rank.
    """
    is_global = "aggregation_scope = 'global'"
    own = "true" if lowest is None else f"(rank is null or rank = {lowest})"
    if not any_global:
        return own
    if not any_local:
        return is_global
    return f"({is_global} or ({own} and step not in (select step from {table} where {is_global})))"


def evenly(items: Sequence[T], most: int) -> Sequence[T]:
    """At most `most` items, evenly over all of them, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def columns_of(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Rows as columns: name → a value per row, None where a row has none."""
    return {name: [row.get(name) for row in rows] for name in names}


def visit_label(block: str | None, loop_step: int | None, layer_idx: int | None, index: int) -> str:
    """What a visit is called, the same at every R: "head 0", "loop step 2, layer 1", "tail 0".

    Args:
        block: "head", "loop" or "tail"; None where it is not known.
        loop_step: of a loop visit.
        layer_idx: of a loop visit.
        index: of another visit: its place in its block, from 0.
    """
    if block == "loop":
        return f"loop step {loop_step}, layer {layer_idx}"
    return f"{block or 'depth'} {index}"


def visit_index(columns: Columns) -> NDArray[np.int64]:
    """Where each row's visit stands, the same at every R: its depth; of a tail visit, its place in the tail. [n]

    Args:
        columns: `block`, `unrolled_pos`, and `step` where there are several; [n] each.
    """
    index = np.array(columns["unrolled_pos"], dtype=np.int64)
    step = np.asarray(columns.get("step", np.zeros(len(index))), dtype=np.int64)
    tails = np.flatnonzero(np.asarray(columns["block"], dtype=object) == "tail")
    order = tails[np.lexsort((index[tails], step[tails]))]
    count = np.arange(len(order))
    begins = np.zeros_like(count)
    begins[1:] = np.where(step[order][1:] != step[order][:-1], count[1:], 0)
    index[order] = count - np.maximum.accumulate(begins)
    return index


def visit_labels(columns: Columns) -> list[str]:
    """The label of every row's visit.

    Args:
        columns: `VISIT`, and `step` where there are several; [n] each.
    """
    index = visit_index(columns).tolist()
    return [
        visit_label(*visit)
        for visit in zip(columns["block"], columns["loop_step"], columns["layer_idx"], index, strict=True)
    ]
