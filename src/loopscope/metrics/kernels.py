"""Compiled reductions: made by `warm_up`, on request only, and used wherever the very same shapes come again.

The kernels are traced and compiled here and looked up by an explicit key (families, shapes, strides, types,
devices). They touch nothing of torch.compile's own state in the process: no graph is added to the model's, nothing
is guarded, and nothing can be compiled again within a training step. A shape that was not warmed up is reduced
eagerly, to the same values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from loopscope.metrics.context import PairContext, VisitContext
from loopscope.metrics.layout import Layout
from loopscope.metrics.pack import Reduced, pack
from loopscope.metrics.registry import pair_families, visit_families
from loopscope.metrics.tensors import PairTensors, VisitTensors

Kernel = Callable[..., tuple[Tensor, Tensor]]
Subject = VisitTensors | PairTensors

_KERNELS: dict[Hashable, Kernel] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """What a warm-up did."""

    seconds: float
    """Wall time of all of it."""
    compiled: int
    """Kernels that were made."""
    known: int
    """Shapes that had a kernel already."""
    failed: tuple[str, ...]
    """Why a kernel could not be made, as text, one per shape; those are reduced eagerly."""


def warm_up(examples: Iterable[tuple[Subject, Tensor | None, Layout]]) -> WarmUp:
    """Compile the reductions of these shapes. Takes seconds each; call it before training, and announce it.

    Args:
        examples: (tensors, valid, layout) as `reduce_visit` and `reduce_pair` take them. Values do not matter;
            shapes, strides, types and device do, and so does whether there is a mask.

    Returns:
        How long it took, how many kernels were made, and why some could not be (no C++ compiler, for example).
        Never raises for a kernel that cannot be made.
    """
    start = time.perf_counter()
    compiled = known = 0
    failed: list[str] = []
    for subject, valid, layout in examples:
        key = _key(subject, valid, layout)
        if key in _KERNELS:
            known += 1
            continue
        try:
            _KERNELS[key] = _compile(subject, valid, layout)
            compiled += 1
        except Exception as error:  # noqa: BLE001 - whatever a compiler may raise, eager reduction remains
            failed.append(f"{layout.kind} E={layout.num_experts} k={layout.top_k}: {_first_line(error)}")
    return WarmUp(seconds=time.perf_counter() - start, compiled=compiled, known=known, failed=tuple(failed))


def forget_kernels() -> None:
    """Reduce eagerly from now on."""
    _KERNELS.clear()


def run_kernel(subject: Subject, valid: Tensor | None, layout: Layout) -> Reduced | None:
    """Reduce with a compiled kernel; None where none was made for these shapes."""
    if not _KERNELS:
        return None
    kernel = _KERNELS.get(_key(subject, valid, layout))
    if kernel is None:
        return None
    sums, maxima = kernel(*_given(subject, valid))
    return Reduced(sums, maxima)


def _families(layout: Layout) -> tuple[Any, ...]:
    if layout.kind == "visit":
        return visit_families(layout.num_experts)
    return pair_families(layout.kind, layout.same_layer, layout.num_experts)


def _given(subject: Subject, valid: Tensor | None) -> list[Tensor]:
    values = [getattr(subject, f.name) for f in fields(subject)]
    return [x for x in (*values, valid) if isinstance(x, Tensor)]


def _key(subject: Subject, valid: Tensor | None, layout: Layout) -> Hashable:
    # Kinds of transition whose columns come from the same sums share a kernel, hence slots instead of the kind.
    tensors = tuple(
        (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x
        for x in (*(getattr(subject, f.name) for f in fields(subject)), valid)
    )
    return (type(subject), layout.num_experts, layout.top_k, tuple(layout.sum_slices), tensors)


def _compile(subject: Subject, valid: Tensor | None, layout: Layout) -> Kernel:
    # Imported late: it takes a second and is needed by a warm-up only.
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [f.name for f in fields(subject) if isinstance(getattr(subject, f.name), Tensor)]
    families = _families(layout)
    context: Any = VisitContext if isinstance(subject, VisitTensors) else PairContext

    def reduction(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        changes: dict[str, Any] = dict(zip(names, tensors, strict=False))
        given: Any = replace(subject, **changes)
        mask = tensors[len(names)] if valid is not None else None
        fused = context(given, mask, layout.num_experts, layout.top_k, fusible=True)
        reduced = pack(families, fused, layout)
        return reduced.sums, reduced.maxima

    inputs = _given(subject, valid)
    with torch.no_grad():
        graph = make_fx(reduction, tracing_mode="fake")(*inputs)
        # Fresh inputs: whatever the compiler keeps of its examples must not be a trace tensor.
        stand_ins: list[Any] = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_() for x in inputs
        ]
        kernel: Any = torch._inductor.compile(graph, stand_ins)
        kernel(*stand_ins)  # code is loaded on the first call
    return kernel  # type: ignore[no-any-return]


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
