"""What a metric is: an entry that describes it, and a family of metrics that share partial sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from loopscope.metrics.null import NOT_APPLICABLE, Null, absent
from loopscope.metrics.partials import Partials

__all__ = ["NOT_APPLICABLE", "Family", "Kind", "Metric", "Null", "Scalar", "Slot", "Table", "Value", "absent"]

Table = Literal[
    "loss",
    "router",
    "residual",
    "transition",
    "probe_loss",
    "probe_overlap",
    "probe_readout",
    "probe_margin",
    "probe_perturbation",
    "probe_specialisation",
    "probe_saturation",
]
Kind = Literal["float64", "int64", "string", "list<int64>", "list<float32>", "list<float64>"]

Scalar = float | int | str
Value = Scalar | list[int] | list[float] | None
"""What a column of a row holds: plain Python only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A column and its definition; the documentation table is generated from these."""

    name: str
    """Column name."""
    table: Table
    """Table of the column."""
    kind: Kind
    """Column type."""
    formula: str
    """Definition, in the notation of the documentation page."""
    unit: str
    """Unit of the value; "1" for pure numbers."""
    needs: tuple[str, ...]
    """Inputs it is computed from; a non-finite valid entry in one of them makes the value null."""
    merge: str
    """How it merges over microbatches, ranks and longer windows."""
    source: str
    """Where the definition comes from."""
    null_rule: str
    """When the value is null, and with which reason."""
    empty_is_value: bool = False
    """True where a row without a valid token still has a value (counts and sums, which are then zero)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A named piece of a partial vector."""

    name: str
    """Unique within the layout."""
    size: Literal["1", "E", "bins"] = "1"
    """One number, one per expert, or one per histogram bin."""


Context = TypeVar("Context")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family(Generic[Context]):
    """Metrics that share partial sums: tensors → slots on the device, slots → values on the host.

    `partial` must not read a value back from the device. `finish` works in NumPy float64 and may divide by
    zero or meet NaN: a value that is not finite becomes null.
    """

    metrics: tuple[Metric, ...]
    """The columns that `finish` gives."""
    sums: tuple[Slot, ...] = ()
    """Slots that merge by addition."""
    maxima: tuple[Slot, ...] = ()
    """Slots that merge by maximum (minima are stored negated)."""
    partial: Callable[[Context], Mapping[str, Tensor]] | None = None
    """Slot name → tensor of the slot's size; None where the family only reads others' slots."""
    finish: Callable[[Partials], Mapping[str, Any]]
    """Column name → number, list, array or `Null`."""
