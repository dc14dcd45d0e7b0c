"""A run as the charts ask it: what has been read once, and how long runs are thinned."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from loopscope.alerts import AlertSettings
from loopscope.analysis import Run
from loopscope.analysis.records import records, value
from loopscope.analysis.scope import Scope, scope_of
from loopscope.report.chart import short

T = TypeVar("T")

LINE_BUCKETS = 400
"""Points of a line at most; each is the mean over a bucket, inside its smallest and largest value."""
HEAT_BUCKETS = 100
"""Columns of a heatmap at most."""
SERIES_BUCKETS = 120
"""Points per line where there is a line per loop step."""

# Depth order of visits that holds for every R: head, loop by step and layer, tail from its own start.
_VISITS = """
    select *, case block when 'head' then 0 when 'loop' then 1 else 2 end as b,
        case when block = 'loop' then loop_step else 0 end as r,
        case block when 'loop' then layer_idx when 'tail'
            then dense_rank() over (partition by step, block order by unrolled_pos) - 1
            else unrolled_pos end as l
    from {table} where {where}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """How a table was thinned."""

    steps: int
    """Steps that have rows."""
    limit: int

    @property
    def per_bucket(self) -> int:
        """Steps in a bucket; 1 where nothing was thinned."""
        return max(1, -(-self.steps // self.limit))

    @property
    def note(self) -> str:
        """Said under the chart; empty where nothing was thinned."""
        if self.per_bucket == 1:
            return ""
        kept = "with mean, smallest and largest of each"
        return f"Thinned: {self.steps:,} steps in buckets of {self.per_bucket:,}, {kept}."


class RunQueries:
    """Queries that several sections ask, each answered once."""

    def __init__(self, run: Run, settings: AlertSettings | None = None) -> None:
        self.run = run
        self.settings = settings or AlertSettings()
        """Bounds of the alert rules, which pictures show too."""
        self._scopes: dict[str, Scope] = {}
        self._counts: dict[str, int] = {}
        self._once: dict[str, Any] = {}

    def has(self, table: str) -> bool:
        """True where the table has live rows."""
        return table in self.run.tables and bool(value(self.run, f"select count(*) from {table}"))

    def scope(self, table: str) -> Scope:
        """The rows that speak for the run."""
        if table not in self._scopes:
            self._scopes[table] = scope_of(self.run, table)
        return self._scopes[table]

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Rows of a query, floats shortened."""
        return [{name: short(cell) for name, cell in row.items()} for row in records(self.run, query)]

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gives, made once per run page."""
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]  # type: ignore[no-any-return]

    def buckets(self, table: str, limit: int) -> Buckets:
        """How `table` is thinned to at most `limit` points."""
        if table not in self._counts:
            where = self.scope(table).where
            self._counts[table] = (
                value(self.run, f"select count(distinct step) from {table} where {where}") or 0
            )
        return Buckets(steps=self._counts[table], limit=limit)

    def thinned(
        self, source: str, columns: Sequence[str], size: int, *, by: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Per bucket of `size` steps (and per group): `step`, `step_to`, and of each column c its mean, as `c`,
        `c_min` and `c_max`.

        Args:
            source: a table or query in parentheses, with a column `step`.
            columns: names of columns, or `expression as name`.
            size: steps per bucket.
            by: columns that tell series apart.
        """
        pairs = [column.rpartition(" as ") for column in columns]
        values = ", ".join(
            f"avg({expression or name}) as {name}, min({expression or name}) as {name}_min, "
            f"max({expression or name}) as {name}_max" for expression, _, name in pairs
        )  # fmt: skip
        groups = "".join(f", {name}" for name in by)
        return self.rows(
            f"select min(step) as step, max(step) as step_to{groups}, {values} from "
            f"(select *, (dense_rank() over (order by step) - 1) // {size} as bucket from {source}) "
            f"group by bucket{groups} order by bucket{groups}"
        )

    def visits(self, table: str) -> str:
        """A query over `table` with b, r, l: the order of depth that holds for every R."""
        return f"({_VISITS.format(table=table, where=self.scope(table).where)})"

    @cached_property
    def last_step(self) -> int:
        """The last step with any row; 0 where there is none."""
        tables = [t for t in self.run.tables if t not in ("attempt", "health")]
        return max((value(self.run, f"select max(step) from {t}") or 0 for t in tables), default=0)

    def missing(self, table: str, columns: Sequence[str], only: str = "true") -> tuple[str, ...]:
        """One sentence per drawn column that is null somewhere: how often, and why.

        Args:
            table: the table.
            columns: its drawn columns.
            only: which of the scope's rows are drawn at all, as a condition.
        """
        if not self.has(table):
            return ()
        where = f"{self.scope(table).where} and {only}"
        nulls = ", ".join(f"count(*) - count({name}) as {name}" for name in columns)
        counts = self.rows(f"select count(*) as n, {nulls} from {table} where {where}")[0]
        notes = []
        for name in columns:
            if counts[name]:
                why = ", ".join(
                    reason.replace("absent:", "absent, ") for reason in self.reasons(table, name, only)
                )
                notes.append(f"{name} is missing in {counts[name]:,} of {counts['n']:,} rows: {why}.")
        return tuple(notes)

    def reasons(self, table: str, name: str, only: str = "true") -> list[str]:
        """Why a column is null, the most frequent reason first."""
        where = f"{self.scope(table).where} and {only}"
        rows = self.rows(
            f"select null_reasons, count(*) as n from {table} where {where} and {name} is null "
            "group by null_reasons order by n desc limit 50"
        )
        found: dict[str, int] = {}
        for row in rows:
            reason = json.loads(row["null_reasons"] or "{}").get(name)
            reason = reason or self.run.manifest.null_reasons.get(table, {}).get(name, "no reason recorded")
            found[reason] = found.get(reason, 0) + row["n"]
        return sorted(found, key=lambda reason: -found[reason])


def visit_label(row: dict[str, Any]) -> str:
    """ "head 0", "loop 2 · layer 1" or "tail 0" of a row with b, r, l."""
    if row["b"] == 1:
        return f"loop {row['r']} · layer {row['l']}"
    return f"{'head' if row['b'] == 0 else 'tail'} {row['l']}"


def quoted(text: object) -> str:
    """A text as SQL writes it."""
    return "'" + str(text).replace("'", "''") + "'"
