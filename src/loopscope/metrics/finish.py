"""Host phase: merged partial vectors → columns of a row, a reason for every null, and what was wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import MetricInputError
from loopscope.metrics.faults import Fault, pair_faults, visit_faults
from loopscope.metrics.layout import Layout
from loopscope.metrics.metric import Family, Metric, Null, Value, absent
from loopscope.metrics.partials import Partials
from loopscope.metrics.registry import REGISTRY, pair_families, visit_families

NO_VALID_TOKEN = absent("no valid token").reason


@dataclass(slots=True)
class Columns:
    """Columns of one row: every metric of its table, and a reason for each that is null."""

    values: dict[str, Value] = field(default_factory=dict)
    nulls: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishedVisit:
    """The router and the residual row of one visit."""

    router: dict[str, Value] | None
    """Column → value; None for a dense visit."""
    router_nulls: dict[str, str]
    """Column → reason, for the columns that are null."""
    residual: dict[str, Value]
    """Column → value."""
    residual_nulls: dict[str, str]
    """Column → reason, for the columns that are null."""
    num_tokens: int
    """Valid tokens, over all microbatches merged."""
    faults: tuple[Fault, ...]
    """What was wrong with the input; see `raise_fatal`."""


@dataclass(frozen=True, slots=True)
class FinishedPair:
    """The transition row of one pair of visits."""

    transition: dict[str, Value]
    """Column → value."""
    transition_nulls: dict[str, str]
    """Column → reason, for the columns that are null."""
    num_tokens: int
    """Valid tokens, over all microbatches merged."""
    faults: tuple[Fault, ...]
    """What was wrong with the input."""


def finish_visit(
    layout: Layout,
    sums: NDArray[np.float64],
    maxima: NDArray[np.float64],
    *,
    score_func: str = "softmax",
    sequence_sharded: bool = False,
) -> FinishedVisit:
    """Columns of one visit from its merged vectors (float64 [n_sum] and [n_max]).

    Args:
        layout: the visit's layout.
        sums: SUM vector, merged over microbatches (and ranks).
        maxima: MAX vector, merged over microbatches (and ranks).
        score_func: the visit's; the z columns do not exist for "sigmoid".
        sequence_sharded: True where ranks hold pieces of a sequence; `token_correlation` is then absent.
    """
    partials = Partials.of(layout, sums, maxima, score_func=score_func, sequence_sharded=sequence_sharded)
    tables = {"router": Columns(), "residual": Columns()}
    failed = _fill(visit_families(layout.num_experts), partials, tables)
    dense = layout.num_experts == 0
    return FinishedVisit(
        None if dense else tables["router"].values,
        {} if dense else tables["router"].nulls,
        tables["residual"].values,
        tables["residual"].nulls,
        int(partials.tokens),
        (*visit_faults(partials), *failed),
    )


def finish_pair(
    layout: Layout,
    sums: NDArray[np.float64],
    maxima: NDArray[np.float64],
    *,
    from_count: NDArray[np.int64] | list[int] | None = None,
    to_count: NDArray[np.int64] | list[int] | None = None,
) -> FinishedPair:
    """Columns of one transition from its merged vectors.

    Args:
        layout: the pair's layout.
        sums: SUM vector, merged over microbatches (and ranks).
        maxima: MAX vector, merged over microbatches (and ranks).
        from_count: [E] merged `expert_count` of the first visit; None where there is none.
        to_count: [E] merged `expert_count` of the second visit.
    """
    counts = None
    if from_count is not None and to_count is not None:
        counts = (np.asarray(from_count, dtype=np.int64), np.asarray(to_count, dtype=np.int64))
    partials = Partials.of(layout, sums, maxima, counts=counts)
    tables = {"transition": Columns()}
    families = pair_families(layout.kind, layout.same_layer, layout.num_experts)
    failed = _fill(families, partials, tables)
    # Families that do not exist for this kind of pair leave their columns to this rule.
    columns = tables["transition"]
    for table, name in REGISTRY:
        if table == "transition" and name not in columns.values:
            columns.values[name] = None
            columns.nulls[name] = "not_applicable"
    return FinishedPair(
        columns.values, columns.nulls, int(partials.tokens), (*pair_faults(partials), *failed)
    )


def raise_fatal(faults: Iterable[Fault], where: str) -> None:
    """Raise MetricInputError where a fault says that the input was not what the contract promises.

    Args:
        faults: of a finished visit.
        where: names the visit in the message, for example "unrolled_pos 3".
    """
    fatal = [fault for fault in faults if fault.fatal]
    if fatal:
        raise MetricInputError(f"{where}: " + " ".join(fault.message for fault in fatal))


def _fill(families: Iterable[Family[Any]], partials: Partials, tables: Mapping[str, Columns]) -> list[Fault]:
    failed: list[Fault] = []
    for family in families:
        try:
            with np.errstate(all="ignore"):
                found: Mapping[str, Any] = family.finish(partials)
        except Exception as error:  # noqa: BLE001 - one metric's fault must not cost the others their row
            names = ", ".join(metric.name for metric in family.metrics)
            failed.append(Fault("metric_failed", 1, f"{names}: {type(error).__name__}: {error}", fatal=False))
            found = {metric.name: Null("failed") for metric in family.metrics}
        for metric in family.metrics:
            columns = tables[metric.table]
            value, reason = settle(metric, found[metric.name], partials)
            columns.values[metric.name] = value
            if reason is not None:
                columns.nulls[metric.name] = reason
    return failed


def settle(metric: Metric, value: Any, partials: Partials) -> tuple[Value, str | None]:
    """Plain value of a column, or None and why: absence first, then non-finite input, then no token."""
    if isinstance(value, Null):
        return None, value.reason
    if any(partials.nonfinite(name) for name in metric.needs):
        return None, "nonfinite"
    if partials.tokens == 0 and not metric.empty_is_value:
        return None, NO_VALID_TOKEN
    plain = to_plain(metric, value)
    return (plain, None) if plain is not None else (None, "nonfinite")


def to_plain(metric: Metric, value: Any) -> Value:
    """Number or array → plain Python of the metric's column type; None where it is not finite. No −0.0."""
    if metric.kind == "string":
        return str(value)
    if metric.kind in ("float64", "int64"):
        number = float(value)
        if not math.isfinite(number):
            return None
        return round(number) if metric.kind == "int64" else number + 0.0
    array = np.asarray(value, dtype=np.float64)
    if not np.isfinite(array).all():
        return None
    if metric.kind == "list<int64>":
        return [int(x) for x in np.rint(array)]
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    return [float(x) + 0.0 for x in narrow] if np.isfinite(narrow).all() else None
