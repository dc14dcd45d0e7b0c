"""What a user writes over a derived plan, read and checked one entry at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from importlib import import_module
from typing import Any, Final

from loopscope.capture.errors import PlanError
from loopscope.capture.nearest import suggestion
from loopscope.capture.reducers import BoundReducer, as_factory
from loopscope.capture.routing import routing_from
from loopscope.capture.source import parse_source
from loopscope.capture.spec import MERGES, MESH_AXES, PLACEMENTS, TENSORS, TOKENS


class _Unset(Enum):
    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset.UNSET
"""A field that was not written."""
AUTO, NONE = "auto", "none"
"""Sentinels: inherit what was derived; clear it."""

CONTRACT = ("tensors", "placements", "merge")
"""What an inserted boundary must say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """An override of one boundary, or of all that a glob matches. What is not written is inherited."""

    tensors: Any = UNSET
    """Tensor name → source; replaces the derived mapping as a whole. Empty: capture nothing."""
    placements: Any = UNSET
    """Mesh axis → placement."""
    merge: Any = UNSET
    """"sum" or "none"."""
    routing: Any = UNSET
    """RoutingSpec, or a mapping of its fields."""
    layer: Any = UNSET
    """Physical number of the layer."""
    calls: Any = UNSET
    """Calls in one forward; None where it varies."""
    block: Any = UNSET
    """Name of the block that a router outside it belongs to. Under a glob, `*` is what its first `*` or `?` matched."""
    tokens: Any = UNSET
    """"same" or "chunks": what the calls of a block see of a forward's tokens."""
    reducers: Any = UNSET
    """Bound reducers; in a file, mappings with `use: "module:function"` and the reducer's own keys."""

    def written(self) -> dict[str, Any]:
        """The fields that were written."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not UNSET}


FIELDS = tuple(item.name for item in fields(Capture))
_CLEARED: dict[str, Any] = {
    "tensors": {}, "placements": {}, "merge": "none", "routing": None, "layer": None, "calls": None, "reducers": (),
    "block": None, "tokens": None,
}  # fmt: skip


def read_override(value: Any, where: str) -> dict[str, Any]:
    """The written fields of one entry, as a new dict; sentinels are left as they are.

    Raises:
        PlanError: an unknown field, or something that is neither a Capture nor a mapping.
    """
    if isinstance(value, Capture):
        return value.written()
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise PlanError(f"{where}: got {type(value).__name__}, expected a mapping of {', '.join(FIELDS)}.")
    for name in value:
        if name not in FIELDS:
            raise PlanError(f"{where}: no field {name!r}.{suggestion(str(name), FIELDS)}")
    return dict(value)


def is_sentinel(name: str, value: Any) -> bool:
    """True for "auto" and "none"; `merge: none` is an ordinary value as well, with the same meaning."""
    return isinstance(value, str) and (value == AUTO or (value == NONE and name != "merge"))


def resolve_field(name: str, value: Any, derived: Any, where: str) -> Any:
    """The value of a field after an override: inherited, cleared, or the written one, checked."""
    if value == AUTO and isinstance(value, str):
        return derived
    if is_sentinel(name, value):
        return _CLEARED[name]
    place = f"{where}.{name}"
    if name in ("tensors", "placements"):
        return _mapping(name, value, place)
    if name == "merge":
        if value not in MERGES:
            raise PlanError(
                f"{place} is {value!r}, expected one of {MERGES}.{suggestion(str(value), MERGES)}"
            )
        return value
    if name == "block":
        if value is not None and (not isinstance(value, str) or not value):
            raise PlanError(f"{place} is {value!r}, expected the name of a block, or null.")
        return value
    if name == "tokens":
        if value is not None and value not in TOKENS:
            raise PlanError(
                f"{place} is {value!r}, expected one of {TOKENS}.{suggestion(str(value), TOKENS)}"
            )
        return value
    if name == "routing":
        return None if value is None else routing_from(value, where)
    if name == "reducers":
        return _reducers(value, place)
    least = 0 if name == "layer" else 1
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise PlanError(f"{place} is {value!r}, expected an integer >= {least}, or null.")
    return value


def _mapping(name: str, value: Any, place: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{place} is {type(value).__name__}, expected a mapping; write {{}} for nothing.")
    keys, what = (TENSORS, "tensor") if name == "tensors" else (MESH_AXES, "mesh axis")
    for key, item in value.items():
        if key not in keys:
            raise PlanError(f"{place}: no {what} {key!r}.{suggestion(str(key), keys)}")
        if name == "tensors":
            parse_source(item, f"{place}.{key}")
        elif item not in PLACEMENTS:
            raise PlanError(
                f"{place}.{key} is {item!r}, expected one of {PLACEMENTS}.{suggestion(str(item), PLACEMENTS)}"
            )
    return dict(value)


def _reducers(value: Any, place: str) -> tuple[BoundReducer, ...]:
    if isinstance(value, (str, Mapping)) or not hasattr(value, "__iter__"):
        raise PlanError(f"{place} is {type(value).__name__}, expected a list of reducers.")
    return tuple(_one_reducer(item, f"{place}[{index}]") for index, item in enumerate(value))


def _one_reducer(item: Any, place: str) -> BoundReducer:
    if isinstance(item, BoundReducer):
        return item
    if not isinstance(item, Mapping):
        return as_factory(item, place).bind({}, place)
    keys = dict(item)
    target = keys.pop("use", None)
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        try:
            target = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise PlanError(f"{place}.use is {item['use']!r}, expected 'module:function': {error}.") from None
    return as_factory(target, f"{place}.use").bind(keys, place)
