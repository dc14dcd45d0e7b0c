"""Derived tensors that keep an autograd graph: a leak that no weak reference to a trace tensor can see.

A result such as ``logits.exp()`` saves only itself, so neither the input's object nor its storage stays
alive, while everything that the input was computed from does.
"""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from loopscope.trace.leak_holders import holders_of_object

GraphMark = tuple[str, int]
"""Name and creation number of a graph node; identifies it without holding it."""


def graph_mark(tensor: Tensor) -> GraphMark | None:
    """Where `tensor` hangs in an autograd graph, as text and number; None for a detached one or a leaf."""
    return None if tensor.grad_fn is None else _mark(tensor.grad_fn)


def new_graphs(since: int) -> list[str]:
    """One line per live tensor with a graph whose node was created at number `since` or later."""
    return _describe([tensor for tensor in _with_graph() if _number(tensor.grad_fn) >= since])


def derived_graphs(marks: set[GraphMark]) -> list[str]:
    """One line per live tensor whose graph runs through one of the nodes `marks`."""
    if not marks:
        return []
    return _describe([tensor for tensor in _with_graph() if _reaches(tensor.grad_fn, marks)])


def _with_graph() -> list[Tensor]:
    # issubclass on type(): isinstance() would run the __class__ of lazy proxies. A tensor subclass must not
    # answer for itself here: its own __torch_function__ may do anything.
    with torch._C.DisableTorchFunctionSubclass():
        return [
            thing
            for thing in gc.get_objects()
            # A compiler's fake tensors stay in its caches; they have a graph node and no memory behind it.
            if issubclass(type(thing), Tensor)
            and not issubclass(type(thing), FakeTensor)
            and thing.grad_fn is not None
        ]


def _reaches(node: Any, marks: set[GraphMark]) -> bool:
    seen: set[GraphMark] = set()
    waiting = [node]
    while waiting:
        mark = _mark(node := waiting.pop())
        if mark in marks:
            return True
        if mark not in seen:
            seen.add(mark)
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return False


def _mark(node: Any) -> GraphMark:
    return (str(node.name()), _number(node))


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _describe(found: list[Tensor]) -> list[str]:
    lines: list[str] = []
    while found:
        # Who holds it is looked up for one alone: that walks all objects of the process several times.
        reference = weakref.ref(found.pop())
        lines.append(_line(reference) + (holders_of_object(reference) if not lines else ""))
    return lines


def _line(reference: weakref.ref[Tensor]) -> str:
    tensor = reference()
    if tensor is None:
        return "a derived tensor that carried a graph and is gone by now"
    return f"a derived tensor {list(tensor.shape)} that carries a graph ({_mark(tensor.grad_fn)[0]})"
