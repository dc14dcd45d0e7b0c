"""What a column of a table is. Everything that lists columns derives from these declarations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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
    """Unit of the value; "1" for pure numbers, empty for keys."""
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
    source: str = ""
    """Where the definition comes from."""
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

    @property
    def is_metric(self) -> bool:
        """True for a measured value, False for keys and descriptions of the row."""
        return bool(self.unit)

    @property
    def heading(self) -> str:
        """The label, or the name with blanks."""
        return self.label or self.name.replace("_", " ")
