"""The lifetime rule, checked: no trace tensor and no trace storage outlives its callback.

For CI and the toy run, not for the hot path: each check walks the garbage collector's list of objects.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from loopscope.errors import LeakError
from loopscope.trace.leak_graph import GraphMark, derived_graphs, graph_mark, new_graphs
from loopscope.trace.leak_holders import holders_of_object, holders_of_storage
from loopscope.trace.point import TracePoint

_MAX_NAMED = 8
_MAX_TRACED_BACK = 2
"""Findings whose holders are looked for; each look walks all objects of the process several times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Note:
    """What is remembered of one trace tensor: text, weak references and numbers, never the tensor."""

    field: str
    unrolled_pos: int
    tensor: weakref.ref[Tensor]
    storage: StorageWeakRef | None
    """None where the storage belongs to the model or cannot be named."""
    own: bool
    """True for a parameter or buffer of the model itself."""
    graph: GraphMark | None
    """Where the tensor was recorded with its graph attached."""

    def __str__(self) -> str:
        hint = "" if self.graph is None else ", recorded without detach()"
        return f"{self.field} at unrolled_pos {self.unrolled_pos}{hint}"


@dataclass(frozen=True, slots=True)
class _Finding:
    """Something that lives on: what, and how to find who holds it. No reference to it."""

    what: str
    holders: Callable[[], str] = str
    """`` held by ...``; an empty text where it is part of `what`."""


class TraceWatch:
    """Weak references to one sink's tensors and storages; made by `watch_trace`."""

    __slots__ = ("_notes", "_points", "_since")

    def __init__(self, sink: Mapping[int, TracePoint], model: nn.Module | None) -> None:
        self._notes = _note_sink(sink, model)
        self._points = tuple((position, weakref.ref(point)) for position, point in sorted(sink.items()))
        # Graph nodes are numbered in order of creation, so a later number means made since the watch began.
        self._since = int(torch._C._autograd._get_sequence_nr())

    def assert_released(self, storages: bool = True) -> None:
        """Raise unless everything that the sink held has been released. The caller clears the sink before.

        Args:
            storages: False right after a callback: no trace tensor or TracePoint object is alive, and nothing
                made since `watch_trace` carries a graph. True (default) where nothing else owns the
                activations (at once under ``no_grad``; in training after ``backward()``, with loss and
                outputs deleted): no trace storage is alive either, under whatever name.

        Raises:
            LeakError: something is alive; names how many of how many, fields, positions, and the holders
                where they can be found.
        """
        # Reference cycles count as a leak, so nothing is collected first: trainers switch the collector off.
        alive = _live_objects(self._notes)
        beside = _live_points(self._points, self._notes)
        if storages:
            alive += _live_storages(self._notes)
            marks = {note.graph for note in self._notes if note.graph is not None}
            beside += [_Finding(line) for line in derived_graphs(marks)]
        else:
            beside += [_Finding(line) for line in new_graphs(self._since)]
        if alive or beside:
            raise LeakError(_message(alive, beside, len(self._notes)))


def watch_trace(sink: Mapping[int, TracePoint], *, model: nn.Module | None = None) -> TraceWatch:
    """Note weak references to a sink's tensors and storages, before a callback gets the sink.

    Args:
        sink: what `disarm()` returned. It is not kept; clear it before asking the watch.
        model: its parameters and buffers may alias trace tensors (a recorded expert bias) and are allowed to
            live on.
    """
    return TraceWatch(sink, model)


def assert_trace_released(sink: dict[int, TracePoint], *, model: nn.Module | None = None) -> None:
    """Clear `sink` and raise unless all its tensors and storages are gone with it.

    The one-shot form, for a moment where nothing else owns the activations: at once under ``no_grad``, after
    ``backward()`` with loss and outputs deleted in training.

    Raises:
        LeakError: as `TraceWatch.assert_released`.
    """
    watch = watch_trace(sink, model=model)
    sink.clear()
    watch.assert_released()


def _note_sink(sink: Mapping[int, TracePoint], model: nn.Module | None) -> tuple[_Note, ...]:
    # A function of its own: when it returns, no loop variable holds the last point.
    owned = [] if model is None else [*model.parameters(), *model.buffers()]
    tensors, storages = set(map(id, owned)), set(map(_storage_key, owned))
    return tuple(
        _note(field, position, tensor, tensors, storages)
        for position, point in sorted(sink.items())
        for field, tensor in point.tensors().items()
    )


def _note(field: str, position: int, tensor: Tensor, tensors: set[int], storages: set[int | None]) -> _Note:
    """Of one trace tensor, where a model owns these `tensors` (ids) and `storages` (keys)."""
    key = _storage_key(tensor)
    return _Note(
        field=field,
        unrolled_pos=position,
        tensor=weakref.ref(tensor),
        storage=None if key is None or key in storages else _weak(tensor),
        own=id(tensor) in tensors,
        graph=graph_mark(tensor),
    )


def _storage(tensor: Tensor) -> Any:
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # a DTensor has no storage itself
    return (tensor if local is None else local()).untyped_storage()


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(_storage(tensor))  # type: ignore[no-untyped-call]


def _is_live(storage: StorageWeakRef | None) -> bool:
    return storage is not None and not storage.expired()  # type: ignore[no-untyped-call]


def _storage_key(tensor: Tensor) -> int | None:
    try:
        return int(_storage(tensor)._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # sparse, or a wrapper without memory of its own


def _live_objects(notes: tuple[_Note, ...]) -> list[_Finding]:
    return [
        _Finding(f"{note} (the tensor itself)", partial(holders_of_object, note.tensor))
        for note in notes
        if not note.own and note.tensor() is not None
    ]


def _live_points(
    points: tuple[tuple[int, weakref.ref[TracePoint]], ...], notes: tuple[_Note, ...]
) -> list[_Finding]:
    # A live point keeps its tensors alive, which then have been named already.
    named = {note.unrolled_pos for note in notes if not note.own and note.tensor() is not None}
    return [
        _Finding(f"the TracePoint at unrolled_pos {position}", partial(holders_of_object, point))
        for position, point in points
        if position not in named and point() is not None
    ]


def _live_storages(notes: tuple[_Note, ...]) -> list[_Finding]:
    return [
        _Finding(f"{note} (its storage)", partial(holders_of_storage, note.storage))
        for note in notes
        if _is_live(note.storage) and note.tensor() is None
    ]


def _message(alive: list[_Finding], beside: list[_Finding], total: int) -> str:
    found = [*alive, *beside]
    named = "; ".join(
        finding.what + (finding.holders() if rank < _MAX_TRACED_BACK else "")
        for rank, finding in enumerate(found[:_MAX_NAMED])
    )
    more = f"; and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return (
        f"{len(alive)} of {total} trace tensors outlived the callback"
        + (f", and {len(beside)} other object(s) made from them" if beside else "")
        + f": {named}{more}. Expected none. A collector must reduce a trace to Python numbers, or to tensors "
        "of its own that share no storage and carry no graph, and keep errors as text; the caller clears "
        "the sink before this check."
    )
