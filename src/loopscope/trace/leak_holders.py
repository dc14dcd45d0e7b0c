"""Who holds a tensor, as far as the garbage collector can tell; text only."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

_MAX_DEPTH = 6
_MAX_HOLDERS = 3
_HERE = __name__.rpartition(".")[0] + ".leak"


def holders_of_object(reference: Callable[[], object | None]) -> str:
    """`` held by ...`` for what a weak reference points to; empty where it is gone."""
    target = reference()
    if target is None:
        return ""
    if isinstance(target, Tensor) and not _referrers(target, frozenset()):
        return _holders_of_views(target)
    return holders_of_object_now(target)


def _holders_of_views(base: Tensor) -> str:
    """A view keeps its base from C++, where nothing can be followed: name the views instead."""
    over = _all_over(_cdata(base)) if _cdata(base) else []
    # By id: a comprehension that names the base would hold it in a cell, one more holder.
    own = id(base)
    over = [thing for thing in over if id(thing) != own]
    return _kept_by(over) if over else holders_of_object_now(base)


def holders_of_object_now(target: object, hidden: frozenset[int] = frozenset()) -> str:
    """`` held by ...``: up to three chains of holders, innermost first.

    Args:
        target: what is held.
        hidden: ids of the caller's own containers, which are no holders worth naming.
    """
    direct = _referrers(target, hidden)
    del direct[_MAX_HOLDERS:]
    hidden = hidden | {id(direct)}
    chains = []
    for holder in direct:  # no comprehension: its closure would be one more holder of the target
        chains.append(_climb(holder, target, hidden))  # noqa: PERF401
    if not chains:
        return ", held by nothing that Python tracks (a local variable, autograd, a NumPy array, C++)"
    return ", held by " + " and by ".join(chains)


def holders_of_storage(reference: StorageWeakRef | None) -> str:
    """`` kept by ...`` for a live storage: the tensors and storage objects over it, and who holds those."""
    if reference is None:
        return ""
    over = _all_over(reference.cdata)
    if not over:
        return ", kept by nothing that Python tracks (a saved tensor of autograd, C++)"
    return _kept_by(over)


def _kept_by(over: list[object]) -> str:
    del over[_MAX_HOLDERS:]
    hidden = frozenset({id(over)})
    named = [f"{_kind(thing)}{holders_of_object_now(thing, hidden)}" for thing in over]
    return ", kept by " + " and ".join(named)


def _all_over(cdata: int) -> list[object]:
    # Tensors first: asking one for its storage makes a storage object, which then says nothing of its own.
    found = [thing for thing in gc.get_objects() if _is_over(thing, cdata)]
    tensors: list[object] = [thing for thing in found if isinstance(thing, Tensor)]
    return tensors or found


def _is_over(thing: object, cdata: int) -> bool:
    # issubclass on type(): isinstance() would run the __class__ of lazy proxies.
    kind = type(thing)
    if issubclass(kind, UntypedStorage):
        return int(thing._cdata) == cdata  # type: ignore[attr-defined]
    return issubclass(kind, Tensor) and _cdata(thing) == cdata  # type: ignore[arg-type]


def _cdata(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0  # no memory of its own


def _kind(thing: object) -> str:
    if isinstance(thing, Tensor):
        return f"another tensor over it of shape {list(thing.shape)}"
    return f"an {type(thing).__name__} object"


def _climb(holder: object, held: object, hidden: frozenset[int]) -> str:
    """The chain from `holder` upwards, along the first referrer of each; bounded."""
    steps: list[str] = []
    seen = {id(held)}
    above: list[object] = []
    for _ in range(_MAX_DEPTH):
        steps.append(_name(holder, held))
        if isinstance(holder, (types.ModuleType, type)):
            break
        seen.add(id(holder))
        above = [thing for thing in _referrers(holder, hidden | {id(above)}) if id(thing) not in seen]
        if isinstance(holder, types.FrameType):  # a caller's frame is no holder; an exception's traceback is
            above = [thing for thing in above if isinstance(thing, types.TracebackType)]
        if not above:
            break
        held, holder = holder, above[0]
    return " < ".join(steps)


def _referrers(target: object, hidden: frozenset[int]) -> list[object]:
    # A frame comes last, since it says least. The lists that this search makes are hidden by their ids.
    found = gc.get_referrers(target)
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
