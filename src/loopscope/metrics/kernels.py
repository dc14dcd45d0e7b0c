"""Compiled reductions: made by `warm_up`, on request only, and used wherever the very same shapes come again.

The kernels are traced and compiled here and looked up by an explicit key (slots, shapes, strides, types, devices).
They touch nothing of torch.compile's own state in the process: no graph is added to the model's, nothing is
guarded, and nothing can be compiled again within a training step. A shape that was not warmed up is reduced
eagerly, to the same values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from loopscope.metrics.context import PairContext, VisitContext
from loopscope.metrics.layout import Layout
from loopscope.metrics.pack import Reduced, pack
from loopscope.metrics.registry import families_of
from loopscope.metrics.tensors import PairTensors, VisitTensors

Kernel = Callable[..., tuple[Tensor, Tensor]]
Subject = VisitTensors | PairTensors

_KERNELS: dict[Hashable, Kernel] = {}
_noted: dict[Hashable, _Recipe] | None = None


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
    return _make({_key(*example): _Recipe.of(*example) for example in examples})


def warm_up_like(run: Callable[[], object]) -> WarmUp:
    """Run something that reduces, note every shape it reduces, and compile for those; see `warm_up`.

    >>> warm_up_like(lambda: loopscope.reduce_trace(sink, meta, valid=valid))  # doctest: +SKIP

    Only shapes are noted, no tensor is kept.
    """
    global _noted
    noted: dict[Hashable, _Recipe] = {}
    _noted = noted
    try:
        run()
    finally:
        _noted = None
    return _make(noted)


def forget_kernels() -> None:
    """Reduce eagerly from now on."""
    _KERNELS.clear()


def run_kernel(subject: Subject, valid: Tensor | None, layout: Layout) -> Reduced | None:
    """Reduce with a compiled kernel; None where none was made for these shapes."""
    if not _KERNELS and _noted is None:
        return None
    key = _key(subject, valid, layout)
    if _noted is not None:
        _noted.setdefault(key, _Recipe.of(subject, valid, layout))
    kernel = _KERNELS.get(key)
    return None if kernel is None else Reduced(*kernel(*_tensors(subject, valid).values()))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a kernel is made from: shapes, never tensors."""

    subject: type[Subject]
    layout: Layout
    constants: dict[str, Any]
    """Fields that hold no tensor."""
    tensors: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]]
    """Field → shape, strides, type and device; "valid" for the mask."""

    @staticmethod
    def of(subject: Subject, valid: Tensor | None, layout: Layout) -> _Recipe:
        given = {f.name: getattr(subject, f.name) for f in fields(subject)}
        return _Recipe(
            type(subject),
            layout,
            {name: value for name, value in given.items() if not isinstance(value, Tensor)},
            {name: _signature(x) for name, x in _tensors(subject, valid).items()},
        )

    def compiled(self) -> Kernel:
        # Imported late: it takes a second and is needed by a warm-up only.
        import torch._inductor
        from torch.fx.experimental.proxy_tensor import make_fx

        inputs: list[Any] = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
            for shape, stride, dtype, device in self.tensors.values()
        ]
        with torch.no_grad():
            graph = make_fx(self._reduction, tracing_mode="fake")(*inputs)
            kernel: Any = torch._inductor.compile(graph, inputs)
            kernel(*inputs)  # code is loaded on the first call
        return kernel  # type: ignore[no-any-return]

    def _reduction(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = dict(zip(self.tensors, tensors, strict=True))
        valid = given.pop("valid", None)
        layout = self.layout
        context: Any = VisitContext if self.subject is VisitTensors else PairContext
        fused = context(
            self.subject(**self.constants, **given), valid, layout.num_experts, layout.top_k, fusible=True
        )
        reduced = pack(families_of(layout), fused, layout)
        return reduced.sums, reduced.maxima


def _make(recipes: dict[Hashable, _Recipe]) -> WarmUp:
    start = time.perf_counter()
    missing = {key: recipe for key, recipe in recipes.items() if key not in _KERNELS}
    failed: list[str] = []
    for key, recipe in missing.items():
        try:
            _KERNELS[key] = recipe.compiled()
        except Exception as error:  # noqa: BLE001 - whatever a compiler may raise, eager reduction remains
            layout, lines = recipe.layout, str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
            failed.append(f"{layout.kind} E={layout.num_experts} k={layout.top_k}: {reason}")
    return WarmUp(
        seconds=time.perf_counter() - start,
        compiled=len(missing) - len(failed),
        known=len(recipes) - len(missing),
        failed=tuple(failed),
    )


def _tensors(subject: Subject, valid: Tensor | None) -> dict[str, Tensor]:
    given = {f.name: getattr(subject, f.name) for f in fields(subject)}
    return {name: x for name, x in {**given, "valid": valid}.items() if isinstance(x, Tensor)}


def _signature(x: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return (x.shape, x.stride(), x.dtype, x.device)


def _key(subject: Subject, valid: Tensor | None, layout: Layout) -> Hashable:
    # Kinds of transition whose columns come from the same sums share a kernel: slots, not the kind.
    tensors = tuple((name, *_signature(x)) for name, x in _tensors(subject, valid).items())
    slots = (*layout.sum_slices, *layout.max_slices)
    return (type(subject), layout.num_experts, layout.top_k, slots, tensors, subject.traits)
