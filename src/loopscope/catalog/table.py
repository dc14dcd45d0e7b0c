"""What a table is: its columns under a version, and the gauges that sum a step of it up.

Everything that lists columns derives from these declarations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from loopscope.catalog.gauge import Gauge
from loopscope.catalog.traits import TRAITS
from loopscope.errors import SchemaError

TypeName = Literal[
    "bool",
    "int32",
    "int64",
    "float32",
    "float64",
    "string",
    "timestamp[us, UTC]",
    "list<int64>",
    "list<float32>",
    "list<float64>",
]
"""The column types: the few that DuckDB, Polars, Daft and Spark read alike."""

Place = Literal["summary", "worst", "diff", "visits", "spread", "probe_diff"]
"""Where people see a column unasked: the summary's tables, its list of worst visits, `loopscope diff`, the trackers'
table of visits, their histograms over visits, the comparison of two probes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """How the report draws a column over training and depth."""

    id: str
    """Identifier of the chart."""
    title: str
    text: str
    """How to read it."""
    side: Literal["mean", "smallest", "largest"] = "mean"
    """What a cell shows of the steps that it stands for: the side on which something would be wrong, else the mean."""
    least: float | None = None
    """The colours begin here, or lower where values do; None: at the smallest value."""
    most: float | None = None
    """The colours end here, or higher where values do; None: at the largest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table and its definition."""

    name: str
    type: TypeName = "float64"
    formula: str
    """Definition, in the notation of the documentation page."""
    unit: str = ""
    """Unit of the value; "1" for pure numbers, empty where there is none."""
    computed: str = ""
    """Module of `loopscope.metrics.<table>` that computes it; empty for what is handed over."""
    needs: tuple[str, ...] = ()
    """Inputs it is computed from; a non-finite valid entry in one of them makes the value null."""
    requires: tuple[str, ...] = ()
    """Inputs that must be there, where `needs` does not say it all; empty: the same as `needs`."""
    merge: str = ""
    """How rows of several ranks or windows give the value of all together: `sum`, `max`, `min`, `constant`, `last`,
    `mean by <weight>`, `root mean square by <weight>` (a weight is a column, or one less another), or
    `from <columns>`, which says what it is computed anew from."""
    null_rule: str = ""
    """When the value is null, and with which reason."""
    undefined_for: tuple[str, ...] = ()
    """Traits of a visit (`loopscope.catalog.traits`) under which the value means nothing and is null."""
    source: str = ""
    """Where the definition comes from; empty for keys and descriptions of the row."""
    empty_is_value: bool = False
    """True where a row without a valid token still has a value (counts and sums, which are then zero)."""
    one_batch: str = ""
    """Of a column about microbatches and ranks: the column that it equals over one batch on one rank."""
    required: bool = False
    """True where a row without it says nothing; every other column may be null."""
    since: int = 1
    """The version of its table that added it."""
    label: str = ""
    """Heading for people."""
    shown: tuple[Place, ...] = ()
    """Where people see it unasked."""
    picture: Picture | None = None
    """How the report draws it over training and depth; None where it does not."""

    def __post_init__(self) -> None:
        if self.type not in get_args(TypeName):
            raise SchemaError(
                f"column {self.name!r} has type {self.type!r}, expected one of {', '.join(get_args(TypeName))}"
            )
        if unknown := set(self.undefined_for) - set(TRAITS):
            raise SchemaError(f"column {self.name!r} is undefined for {sorted(unknown)}, which are no traits")

    @property
    def is_metric(self) -> bool:
        """True for a measured value, False for keys and descriptions of the row."""
        return bool(self.source)

    @property
    def heading(self) -> str:
        """The label, or the name with blanks."""
        return self.label or self.name.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table's columns at its newest version. A version adds columns and never changes one."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    """Columns that name a row within one attempt; null counts as a value (`rank` of global rows)."""
    version: int = 1
    oldest: int = 1
    """The oldest version whose files are read; files of an older one are refused by name."""
    progress: bool = True
    """True where a row shows that training went on; health rows alone do not."""
    gauges: tuple[Gauge, ...] = ()
    """The numbers that stand for a step of this table."""
    shown_rows: tuple[tuple[str, str], ...] = ()
    """(column, value): the rows whose columns people see unasked; empty: every row."""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise SchemaError(f"table {self.name!r} names a column twice: {sorted(names)}")
        if missing := set(self.primary_key) - set(names):
            raise SchemaError(f"table {self.name!r} has key columns that do not exist: {sorted(missing)}")
        if late := [column.name for column in self.columns if not 1 <= column.since <= self.version]:
            raise SchemaError(
                f"table {self.name!r} is at version {self.version}, but columns {late} come later"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def by_name(self) -> Mapping[str, Column]:
        """Column name → column."""
        return {column.name: column for column in self.columns}

    @cached_property
    def metrics(self) -> Mapping[str, Column]:
        """Column name → column, of the measured values alone."""
        return {column.name: column for column in self.columns if column.is_metric}

    def shown(self, place: Place) -> tuple[Column, ...]:
        """The columns that people see there, in order."""
        return tuple(column for column in self.columns if place in column.shown)

    def describe(self) -> dict[str, Any]:
        """The schema as plain data, for `schemas/<table>.v<N>.json`."""
        return {
            "table": self.name,
            "version": self.version,
            "doc": self.doc,
            "primary_key": list(self.primary_key),
            "columns": [
                {
                    "name": c.name,
                    "type": c.type,
                    "nullable": not c.required,
                    "since": c.since,
                    "doc": c.formula,
                }
                for c in self.columns
            ],
        }
