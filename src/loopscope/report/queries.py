"""The queries of a report: what charts ask a run, and how long runs are thinned."""

import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from loopscope.alerts import AlertSettings
from loopscope.analysis import Run
from loopscope.analysis.records import value
from loopscope.analysis.scope import Scope, scope_of
from loopscope.catalog.rows import BLOCKS, visit_label
from loopscope.report.chart import Chart
from loopscope.report.columnar import shortened

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


class Buckets(NamedTuple):
    """How a table is thinned."""

    size: int
    """Steps in a bucket; 1 where nothing is thinned."""
    note: tuple[str, ...]
    """Said under the chart."""


def buckets(steps: int, limit: int) -> Buckets:
    """Buckets of equal size, at most `limit` of them."""
    size = max(1, -(-steps // limit))
    said = f"Thinned: {steps:,} steps in buckets of {size:,}, with mean, smallest and largest of each."
    return Buckets(size, () if size == 1 else (said,))


class RunQueries:
    """Queries that several sections ask, each answered once."""

    def __init__(self, run: Run, settings: AlertSettings | None = None) -> None:
        self.run = run
        self.settings = settings or AlertSettings()
        """Bounds of the alert rules, which pictures show too."""
        self._answers: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once per page."""
        if key not in self._answers:
            self._answers[key] = make()
        return self._answers[key]  # type: ignore[no-any-return]

    def has(self, table: str) -> bool:
        """True where the table has live rows."""
        query = f"select count(*) from {table}"
        return self.once(("rows", table), lambda: table in self.run.tables and bool(value(self.run, query)))

    def scope(self, table: str) -> Scope:
        """The rows that speak for the run."""
        return self.once(("scope", table), lambda: scope_of(self.run, table))

    def table(self, query: str) -> pa.Table:
        """The answer to a query: floats have five significant digits, and are null where they are not finite."""
        return shortened(self.run.sql(query).to_arrow_table())

    def rows(self, query: str) -> list[dict[str, Any]]:
        """The same for a few rows, as dicts."""
        return self.table(query).to_pylist()  # type: ignore[no-any-return]

    def thinned(
        self, source: str, limit: int, columns: Sequence[str], *, by: Sequence[str] = ()
    ) -> tuple[pa.Table, Buckets]:
        """Per bucket of steps (and per group): `step`, `step_to`, and of each column c its mean, as `c`, `c_min` and
        `c_max`; and what the buckets are.

        Args:
            source: a query in parentheses, with a column `step`.
            limit: buckets at most.
            columns: names of columns, or `expression as name`.
            by: columns that tell series apart.
        """
        thinned = buckets(value(self.run, f"select count(distinct step) from {source}"), limit)
        pairs = [column.rpartition(" as ") for column in columns]
        values = ", ".join(
            f"avg({expression or name}) as {name}, min({expression or name}) as {name}_min, "
            f"max({expression or name}) as {name}_max" for expression, _, name in pairs
        )  # fmt: skip
        groups = "".join(f", {name}" for name in by)
        rows = self.table(
            f"select min(step) as step, max(step) as step_to{groups}, {values} from "
            f"(select *, (dense_rank() over (order by step) - 1) // {thinned.size} as bucket from {source}) "
            f"group by bucket{groups} order by bucket{groups}"
        )
        return rows, thinned

    def speaking(self, table: str, only: str = "true") -> str:
        """A query over the rows of `table` that speak for the run, and meet a condition."""
        return f"(select * from {table} where {self.scope(table).where} and {only})"

    def visits(self, table: str) -> str:
        """A query over `table` with b, r, l: the order of depth that holds for every R."""
        return f"({_VISITS.format(table=table, where=self.scope(table).where)})"

    def last_visits(self, table: str, columns: str) -> pa.Table:
        """Rows of a probe's last step in the order of depth, with b, r, l and the name of the `visit`; maybe none."""
        if not self.has(table):
            return pa.table({})
        rows = self.table(
            f"select step, b, r, l, {columns} from {self.visits(table)} "
            f"where step = (select max(step) from {table} where {self.scope(table).where}) order by all"
        )
        return rows.append_column("visit", [visit_names(rows)])

    def last_step(self) -> int:
        """The last step with any row; 0 where there is none."""
        tables = [t for t in self.run.tables if t not in ("attempt", "health")]
        steps = (value(self.run, f"select max(step) from {table}") or 0 for table in tables)
        return self.once("last step", lambda: max(steps, default=0))

    def chart(
        self,
        table: str,
        columns: Sequence[str],
        *,
        buckets: Buckets | None = None,
        notes: Sequence[str] = (),
        missing: Sequence[str] | None = None,
        only: str = "true",
        **more: Any,
    ) -> Chart:
        """A chart of one table that says which rows it is made of, how they were thinned, and what is missing.

        Args:
            table: the table.
            columns: what is drawn.
            buckets: how it was thinned.
            notes: further notes.
            missing: columns whose missing values are told; None: all of `columns`.
            only: which of the scope's rows are drawn at all, as a condition.
            more: the other fields of `Chart`.
        """
        told = self.missing(table, columns if missing is None else missing, only)
        return Chart(
            metrics=tuple((table, column) for column in columns),
            scope=self.scope(table).words,
            notes=(*(buckets.note if buckets else ()), *notes, *told),
            **more,
        )

    def missing(self, table: str, columns: Sequence[str], only: str = "true") -> tuple[str, ...]:
        """One sentence per drawn column that is null somewhere: how often, and why.

        Args:
            table: the table.
            columns: its drawn columns.
            only: which of the scope's rows are drawn at all, as a condition.
        """
        if not columns or not self.has(table):
            return ()
        where = f"{self.scope(table).where} and {only}"
        nulls = ", ".join(f"count(*) - count({name}) as {name}" for name in columns)
        (counts,) = self.rows(f"select count(*) as n, {nulls} from {table} where {where}")
        return tuple(
            f"{name} is missing in {counts[name]:,} of {counts['n']:,} rows: "
            + ", ".join(why.replace("absent:", "absent, ") for why in self.reasons(table, name, only))
            + "."
            for name in columns if counts[name]
        )  # fmt: skip

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


def visit_names(rows: pa.Table) -> list[str]:
    """What each row's visit is called, from its b, r, l."""
    places = zip(*(rows[key].to_pylist() for key in "brl"), strict=True)
    return [visit_label(BLOCKS[block], loop_step, index, index) for block, loop_step, index in places]


def quoted(text: object) -> str:
    """A text as SQL writes it."""
    return "'" + str(text).replace("'", "''") + "'"
