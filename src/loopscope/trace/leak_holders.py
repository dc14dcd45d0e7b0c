"""Who holds a tensor, as far as the garbage collector can tell; text only."""

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

_MAX_DEPTH = 6
"""Links of one chain; each costs a walk over all objects of the process."""
_MAX_HOLDERS = 2
_UNTRACKED = ", held by nothing that Python tracks (a local variable, autograd, a NumPy array, C++)"
_HERE = __name__.rpartition(".")[0] + ".leak"


def holders_of_object(reference: Callable[[], object | None]) -> str:
    """`` held by ...`` for what a weak reference points to; empty where it is gone."""
    box = [reference()]
    if box[0] is None:
        return ""
    if found := _holders(box):
        return found
    # A view keeps its base from C++, where nothing can be followed: name the views instead.
    views = _tensors_over(_cdata(box[0]), but=id(box[0])) if isinstance(box[0], Tensor) else []
    return _kept_by(views) if views else _UNTRACKED


def holders_of_storage(reference: StorageWeakRef | None) -> str:
    """`` kept by ...`` for a live storage: the tensors and storage objects over it, and who holds those."""
    if reference is None:
        return ""
    over = _tensors_over(reference.cdata) or _storages_over(reference.cdata)
    return (
        _kept_by(over) if over else ", kept by nothing that Python tracks (a saved tensor of autograd, C++)"
    )


def _kept_by(over: list[object]) -> str:
    named: list[str] = []
    while over and len(named) < _MAX_HOLDERS:
        box = [over.pop()]  # moved, not copied: `over` is no holder of what it no longer holds
        named.append(f"{_kind(box[0])}{_holders(box) or _UNTRACKED}")
    return ", kept by " + " and ".join(named)


def _tensors_over(cdata: int, *, but: int = 0) -> list[object]:
    # issubclass on type(): isinstance() would run the __class__ of lazy proxies.
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), Tensor) and id(thing) != but and _cdata(thing) == cdata != 0
    ]


def _storages_over(cdata: int) -> list[object]:
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), UntypedStorage) and int(thing._cdata) == cdata
    ]


def _cdata(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0  # no memory of its own


def _kind(thing: object) -> str:
    if isinstance(thing, Tensor):
        return f"another tensor over it of shape {list(thing.shape)}"
    return f"an {type(thing).__name__} object"


def _holders(box: list[Any]) -> str:
    """`` held by ...``: chains of holders of ``box[0]``, innermost first; empty where there are none.

    The target comes in a list and is followed in one function: an argument, a cell or a list of ours would be one
    more holder. Lists that must exist are hidden by their ids.
    """
    direct = _others(gc.get_referrers(box[0]), {id(box)})
    del direct[_MAX_HOLDERS:]
    chains = []
    for first in range(len(direct)):
        steps = [_name(direct[first], box[0])]
        above, seen = [direct[first]], {id(box[0]), id(direct[first]), id(box), id(direct)}
        while above and len(steps) < _MAX_DEPTH and not isinstance(above[0], (types.ModuleType, type)):
            held = above
            above = _others(gc.get_referrers(held[0]), seen | {id(held), id(above)})
            if isinstance(held[0], types.FrameType):  # a caller's frame is no holder; a traceback's is
                above = [thing for thing in above if isinstance(thing, types.TracebackType)]
            del above[1:]
            if above:
                steps.append(_name(above[0], held[0]))
                seen.add(id(above[0]))
        chains.append(" < ".join(steps))
    return ", held by " + " and by ".join(chains) if chains else ""


def _others(found: list[Any], hidden: set[int]) -> list[Any]:
    # A frame comes last, since it says least.
    kept = [thing for thing in found if id(thing) not in hidden and not _is_search(thing)]
    kept.sort(key=_is_frame)
    return kept


def _is_frame(thing: object) -> bool:
    return isinstance(thing, types.FrameType)


def _is_search(thing: object) -> bool:
    if isinstance(thing, types.GeneratorType):
        thing = thing.gi_frame
    if isinstance(thing, types.FrameType):
        return str(thing.f_globals.get("__name__", "")).startswith(_HERE)
    return isinstance(thing, weakref.ReferenceType)


def _name(holder: Any, held: object) -> str:
    """One link of the chain: the holder's kind, and under which name it holds."""
    kind = type(holder).__name__
    if isinstance(holder, dict):
        key = next((repr(key) for key, value in holder.items() if value is held), None)
        return kind if key is None else f"{kind}[{key}]"
    if isinstance(holder, types.FrameType):
        # Reading f_locals would add a reference that lives as long as the frame.
        return f"a local of {holder.f_code.co_qualname}, line {holder.f_lineno}"
    if isinstance(holder, types.FunctionType):
        return f"function {holder.__qualname__}"
    if isinstance(holder, BaseException):
        return f"exception {kind}"
    if isinstance(holder, types.ModuleType):
        return f"module {holder.__name__}"
    attribute = _attribute(holder, held)
    return kind if attribute is None else f"{kind}.{attribute}"


def _attribute(holder: object, held: object) -> str | None:
    # Slots and instance values, read without running a property.
    for base in type(holder).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and _slot(member, holder) is held:
                return name
    try:
        instance = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
    return next((name for name, value in instance.items() if value is held), None)


def _slot(member: types.MemberDescriptorType, holder: object) -> object:
    try:
        return member.__get__(holder, type(holder))
    except AttributeError:
        return None  # declared and never set
