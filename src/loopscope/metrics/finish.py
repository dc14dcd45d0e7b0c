"""Host phase: merged partial vectors → columns, a reason for every null, and what was wrong with the input.

All visits (or pairs) of one layout are finished together, as arrays; rows are made from the columns at the end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.catalog.registry import TABLES
from loopscope.catalog.table import Column
from loopscope.catalog.traits import TRAITS
from loopscope.errors import MetricInputError
from loopscope.metrics.family import (
    NOT_APPLICABLE,
    Family,
    Floats,
    FoundColumns,
    Masked,
    Null,
    Partials,
    absent,
)
from loopscope.metrics.faults import Fault, visit_faults
from loopscope.metrics.layout import Layout
from loopscope.metrics.registry import families_of

_NO_VALID_TOKEN = absent("no valid token")
_NONFINITE, _FAILED = Null("nonfinite"), Null("failed")


@dataclass(frozen=True, slots=True)
class FinishedColumns:
    """The metric columns of V rows of one table."""

    values: dict[str, list[Any]]
    """Column → plain Python value per row; None where it is null."""
    nulls: list[dict[str, str]]
    """Per row, column → reason of its nulls. Rows with the same nulls share one object."""


@dataclass(frozen=True, slots=True)
class FinishedVisits:
    """The router and the residual rows of V visits of one layout."""

    router: FinishedColumns | None
    """None for dense visits."""
    residual: FinishedColumns
    num_tokens: list[int]
    """[V]; valid tokens, over all microbatches merged."""
    counts: Floats | None
    """[V, E]; assignments per expert, None for dense visits."""
    faults: list[tuple[int, Fault]]
    """(index of the visit, what was wrong with its input); see `raise_fatal`."""


@dataclass(frozen=True, slots=True)
class FinishedPairs:
    """The transition rows of V pairs of visits of one layout."""

    transition: FinishedColumns
    num_tokens: list[int]
    """[V]; valid tokens, over all microbatches merged."""
    faults: list[tuple[int, Fault]]
    """(index of the pair, what was wrong)."""


def finish_visits(
    layout: Layout,
    sums: Floats,
    maxima: Floats,
    *,
    score_funcs: Sequence[str],
    sequence_sharded: bool = False,
) -> FinishedVisits:
    """Columns of V visits from their merged vectors.

    Args:
        layout: the visits' layout.
        sums: SUM vectors [V, n_sum] float64, merged over microbatches (and ranks).
        maxima: MAX vectors [V, n_max] float64, merged over microbatches (and ranks).
        score_funcs: [V], of `SCORE_FUNCS`; the z columns exist for "softmax" alone.
        sequence_sharded: True where ranks hold pieces of a sequence; `token_correlation` is then absent.
    """
    partials = Partials.of(
        layout,
        sums,
        maxima,
        is_softmax=np.array([name == "softmax" for name in score_funcs], dtype=np.bool_),
        sequence_sharded=sequence_sharded,
    )
    router, residual = _Builder("router", partials), _Builder("residual", partials)
    for family in families_of(layout):
        (router if family.table == "router" else residual).add(family)
    dense = layout.num_experts == 0
    return FinishedVisits(
        router=None if dense else router.columns(),
        residual=residual.columns(),
        num_tokens=partials.tokens.astype(np.int64).tolist(),
        counts=None if dense else partials["count"],
        faults=[*visit_faults(partials), *router.failed, *residual.failed],
    )


def finish_pairs(
    layout: Layout,
    sums: Floats,
    maxima: Floats,
    *,
    from_count: Floats | None = None,
    to_count: Floats | None = None,
) -> FinishedPairs:
    """Columns of V transitions from their merged vectors.

    Args:
        layout: the pairs' layout.
        sums: SUM vectors [V, n_sum] float64, merged over microbatches (and ranks).
        maxima: MAX vectors [V, n_max] float64, merged over microbatches (and ranks).
        from_count: [V, E] merged expert counts of the first visits, NaN where they are not known; None: of none.
        to_count: [V, E] of the second visits.
    """
    partials = Partials.of(layout, sums, maxima, counts=(from_count, to_count))
    builder = _Builder("transition", partials)
    for family in families_of(layout):
        builder.add(family)
    return FinishedPairs(builder.columns(), partials.tokens.astype(np.int64).tolist(), builder.failed)


def raise_fatal(faults: Iterable[Fault], where: str) -> None:
    """Raise MetricInputError where a fault says that the input was not what the contract promises.

    Args:
        faults: of a finished visit.
        where: names the visit in the message, for example "unrolled_pos 3".
    """
    fatal = [fault for fault in faults if fault.fatal]
    if fatal:
        raise MetricInputError(f"{where}: " + " ".join(fault.message for fault in fatal))


class _Builder:
    """Collects the columns of one table: values, and per column the code of each row's reason."""

    def __init__(self, table: str, partials: Partials) -> None:
        self.failed: list[tuple[int, Fault]] = []
        """(row, fault) of families whose `finish` raised."""
        self._table = TABLES[table]
        self._partials = partials
        self._values: dict[str, list[Any]] = {}
        self._codes: dict[str, NDArray[np.int8]] = {}
        self._reasons: list[Null] = []

    def add(self, family: Family[Any]) -> None:
        """Finish one family; where it fails for one row, that row alone goes without its columns."""
        if family.finish is None:
            return
        try:
            with np.errstate(all="ignore"):
                found = family.finish(self._partials)
                for column in family.columns:
                    self._values[column.name], self._codes[column.name] = self._settled(
                        column, found[column.name], self._partials
                    )
        except Exception:  # noqa: BLE001 - one metric's fault must not cost the others their rows
            self._add_by_row(family)

    def columns(self) -> FinishedColumns:
        """Every metric of the table; those that no family of this layout gives do not apply to it."""
        size = len(self._partials)
        missing = [None] * size
        not_applicable = np.full(size, self._code(NOT_APPLICABLE), dtype=np.int8)
        names = tuple(self._table.metrics)
        values = {name: self._values.get(name, missing) for name in names}
        codes = np.stack([self._codes.get(name, not_applicable) for name in names], axis=1)
        patterns: dict[bytes, dict[str, str]] = {}
        nulls = []
        for row in codes:
            key = row.tobytes()
            if key not in patterns:
                patterns[key] = {
                    name: self._reasons[code - 1].reason
                    for name, code in zip(names, row.tolist(), strict=True)
                    if code
                }
            nulls.append(patterns[key])
        return FinishedColumns(values, nulls)

    def _add_by_row(self, family: Family[Any]) -> None:
        rows = []
        for index in range(len(self._partials)):
            partials = self._partials.row(index)
            found: FoundColumns = {}
            try:
                assert family.finish is not None
                with np.errstate(all="ignore"):
                    found = family.finish(partials)
                    rows.append([self._settled(c, found[c.name], partials) for c in family.columns])
            except Exception as error:  # noqa: BLE001 - the same, row by row
                names = ", ".join(column.name for column in family.columns)
                text = f"{names}: {type(error).__name__}: {error}"
                self.failed.append((index, Fault("metric_failed", 1, text, fatal=False)))
                rows.append([self._settled(c, _FAILED, partials) for c in family.columns])
        for column, settled in zip(family.columns, zip(*rows, strict=True), strict=True):
            self._values[column.name] = [value for values, _ in settled for value in values]
            self._codes[column.name] = np.concatenate([codes for _, codes in settled])

    def _settled(self, column: Column, found: Any, partials: Partials) -> tuple[list[Any], NDArray[np.int8]]:
        """Plain values and reasons: absence first, then non-finite input, then no token, then a non-finite value."""
        size = len(partials)
        codes = np.zeros(size, dtype=np.int8)
        if isinstance(found, Null):
            codes[:] = self._code(found)
            return [None] * size, codes
        nulls = [(partials.has(trait), absent(TRAITS[trait])) for trait in column.undefined_for]
        nulls += found.nulls if isinstance(found, Masked) else ()
        nulls += [(partials.nonfinite(name) > 0, _NONFINITE) for name in column.needs]
        if not column.empty_is_value:
            nulls.append((partials.tokens == 0, _NO_VALID_TOKEN))
        array = np.asarray(found.values if isinstance(found, Masked) else found, dtype=np.float64)
        if array.ndim == 0:
            array = np.broadcast_to(array, (size,))
        if column.type == "list<float32>":
            array = array.astype(np.float32)
        bad: NDArray[np.bool_] = ~np.isfinite(array)
        nulls.append((bad if array.ndim == 1 else bad.sum(1) > 0, _NONFINITE))
        for rows, why in nulls:
            codes[rows & (codes == 0)] = self._code(why)
        null = codes != 0
        if null.any():
            array = np.where(null if array.ndim == 1 else null[:, None], 0.0, array)
        is_integer = column.type in ("int64", "list<int64>")
        # + 0.0: no −0.0; float32 lists hold the doubles that they stand for.
        plain = np.rint(array).astype(np.int64) if is_integer else array.astype(np.float64) + 0.0
        listed: list[Any] = plain.tolist()
        for index in np.flatnonzero(null).tolist():
            listed[index] = None
        return listed, codes

    def _code(self, null: Null) -> int:
        if null not in self._reasons:
            self._reasons.append(null)
        return self._reasons.index(null) + 1
