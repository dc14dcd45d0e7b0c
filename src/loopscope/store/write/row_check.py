"""Rows that do not fit at first sight: what is exact is converted, what cannot be a value becomes null, and is told.

Rows of loopscope's own never come here. What comes by hand may hold scalars of NumPy, torch or pandas, and the loss of
a step that diverged.
"""

import contextlib
import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal

import msgspec

from loopscope.errors import SchemaError
from loopscope.store.schema import TYPES, TableSchema

Kind = Literal["nonfinite", "bad_value"]
_log = logging.getLogger("loopscope.store")
_MISSING = frozenset(("NAType", "NaTType", "MaskedConstant"))
"""Types of pandas' and NumPy's words for a missing value; `item()` of the last is 0."""
_EXACT = 2**53
_REASONS: Mapping[Kind, str] = {"nonfinite": "nonfinite", "bad_value": "failed"}


class RowMender:
    """Makes rows of one writer fit, and keeps count of the values that became null."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {"nonfinite": 0, "bad_value": 0}
        """Values that are null instead: NaN and ±inf; values of a wrong type or size."""
        self.last: dict[str, tuple[int, str | None]] = {}
        """Step and words of the last of each."""
        self._told: set[tuple[str, str, Kind]] = set()

    def mend(self, schema: TableSchema, row: Mapping[str, Any], *, strict: bool) -> msgspec.Struct:
        """The row in its typed form.

        Args:
            schema: of its table.
            row: as it was handed over.
            strict: refuse the row where a value does not fit; else the value is null, with its reason, counted, and
                told in the log the first time. What a row cannot be without is refused in either case.

        Raises:
            SchemaError: it cannot be made to fit.
        """
        if not isinstance(row, Mapping):
            return _converted(schema, row)
        plain = {name: _plain(value, schema.by_name[name].type) if name in schema.name_set else value
                 for name, value in row.items()}  # fmt: skip
        try:
            return _converted(schema, plain)
        except SchemaError:
            if strict:
                raise
        found: dict[Kind, list[str]] = {"nonfinite": [], "bad_value": []}
        said: dict[str, str] = {}
        for name, value in plain.items():
            if name not in schema.name_set or schema.by_name[name].required:
                continue
            kind, why = _misfit(value, schema.by_name[name].type)
            if kind is not None:
                found[kind].append(name)
                said[name] = f"{schema.name}.{name} is {why}"
        _set_null(plain, schema, found)
        typed = _converted(schema, plain)
        self._tell(schema.name, int(getattr(typed, "step", 0)), found, said)
        return typed

    def _tell(self, table: str, step: int, found: Mapping[Kind, list[str]], said: Mapping[str, str]) -> None:
        for kind, names in found.items():
            self.counts[kind] += len(names)
            for name in names:
                self.last[kind] = step, said[name]
                if (table, name, kind) not in self._told:
                    self._told.add((table, name, kind))
                    _log.warning(
                        "loopscope: step %d: %s; it is null in its row, with its reason, and counted", step, said[name]
                    )  # fmt: skip


def _converted(schema: TableSchema, row: Any) -> msgspec.Struct:
    try:
        typed: msgspec.Struct = msgspec.convert(row, schema.row_type)
    except (msgspec.ValidationError, TypeError) as error:
        raise SchemaError(
            f"a row of table {schema.name!r} does not fit schema version {schema.version}: {error}. Expected numbers, "
            "texts and lists of numbers; finite floats, null (None) where a value is missing."
        ) from None
    return typed


@cache
def _annotation(kind: str) -> Any:
    return TYPES[kind].python | None


def _misfit(value: Any, kind: str) -> tuple[Kind | None, str]:
    """What is wrong with a plain value, and in words; (None, "") where it fits."""
    try:
        msgspec.convert(value, _annotation(kind))
    except (msgspec.ValidationError, TypeError) as error:
        values = value if isinstance(value, list) else [value]
        bad = [one for one in values if isinstance(one, float | Decimal) and not math.isfinite(one)]
        if bad and "str" not in kind:
            return "nonfinite", f"{bad[0]}" if value is bad[
                0
            ] else f"a list with {len(bad)} values not finite"
        return "bad_value", f"{_shown(value)}, expected {kind} ({error})"
    return None, ""


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"


def _set_null(row: dict[str, Any], schema: TableSchema, found: Mapping[Kind, list[str]]) -> None:
    """Null for what does not fit, with its reason, as rows of the collector have it."""
    row |= {name: None for names in found.values() for name in names}
    told = None
    with contextlib.suppress(ValueError, TypeError):
        told = json.loads(row.get("null_reasons") or "{}")
    if isinstance(told, dict) and "null_reasons" in schema.name_set:
        told |= {name: _REASONS[kind] for kind, names in found.items() for name in names}
        row["null_reasons"] = json.dumps(told)
    if found["nonfinite"] and "nonfinite_fields" in schema.name_set and not row.get("nonfinite_fields"):
        row["nonfinite_fields"] = ",".join(found["nonfinite"])


def _plain(value: Any, kind: str) -> Any:
    """The same value as Python has it, where that is exact; else what was given, which does not fit."""
    try:
        if kind.startswith("list<") and not isinstance(value, str | bytes | Mapping):
            items = _items(value)
            return value if items is None else [_item(item, kind[5:-1]) for item in items]
        return _scalar(value, kind)
    except Exception:  # noqa: BLE001 - foreign types raise what they like: a tensor without data, say
        return value


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, list | tuple):
        return list(value)
    if _is_partial(value) or _masked(value) or len(getattr(value, "shape", ())) != 1:
        return None
    return list(value.tolist())


def _item(value: Any, kind: str) -> Any:
    # Floats in a list of integers are another column's values.
    found = _scalar(value, kind)
    return value if kind.startswith("int") and isinstance(value, float) else found


def _scalar(value: Any, kind: str) -> Any:
    if value is None or type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "item") and hasattr(value, "dtype"):
        value = _of_array(value, kind)
        if hasattr(value, "dtype"):
            return value
    if isinstance(value, datetime) and type(value) is not datetime:
        return value.to_pydatetime(warn=False) if hasattr(value, "to_pydatetime") else value
    if isinstance(value, bool):
        return value
    if kind.startswith("int") and isinstance(value, Real | Decimal):
        return _whole(value)
    if kind.startswith("float") and isinstance(value, Real | Decimal):
        return float(value)
    return (
        str(value)
        if type(value) is not str and isinstance(value, str) and type(value).__str__ is str.__str__
        else value
    )


def _whole(value: Any) -> Any:
    # A float above 2^53 may stand for any of several integers.
    exact = isinstance(value, Integral | Decimal) or abs(value) <= _EXACT
    return int(value) if exact and math.isfinite(value) and int(value) == value else value


def _of_array(value: Any, kind: str) -> Any:
    """The one value of an array or tensor; the array itself where it has several, or a part of one."""
    if math.prod(value.shape) != 1 or _is_partial(value):
        return value
    if _masked(value):
        return None
    sort = getattr(value.dtype, "kind", "")
    if sort == "M" and kind.startswith("timestamp"):
        when = value.astype("datetime64[us]").item()
        return when if when is None else when.replace(tzinfo=UTC)
    if sort in ("m", "M"):
        return value  # item() of nanoseconds is a plain number.
    found = value.item()
    # Of types that Python lacks, item() may be one of their own: longdouble, bfloat16.
    return found if isinstance(found, bool | int | float | str | complex) else float(found)


def _is_partial(value: Any) -> bool:
    """True for a DTensor of which this rank holds a part: its own value is a plausible wrong one."""
    return not all(placement.is_replicate() for placement in getattr(value, "placements", ()))


def _masked(value: Any) -> bool:
    mask = getattr(value, "mask", None)
    return mask is not None and hasattr(mask, "any") and bool(mask.any())
