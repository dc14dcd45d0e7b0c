"""Device phase: raw tensors → two float64 vectors of partial sums. No value is read back from the device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loopscope.metrics.context import PairContext, VisitContext
from loopscope.metrics.family import EMPTY
from loopscope.metrics.kernels import run_kernel
from loopscope.metrics.layout import Layout
from loopscope.metrics.pack import Reduced, pack
from loopscope.metrics.registry import families_of
from loopscope.metrics.residual.rows import PIECE
from loopscope.metrics.tensors import PairTensors, VisitTensors, check_pair, check_visit


@torch.no_grad()
def reduce_visit(tensors: VisitTensors, valid: Tensor | None, layout: Layout) -> Reduced:
    """Partial sums and maxima of one visit in one microbatch, on the device of the input.

    Args:
        tensors: the raw tensors of the visit.
        valid: [B, S] bool, True for tokens that count; None for all. Tokens that do not count may hold anything.
        layout: `visit_layout(E, k)` of this visit.

    Raises:
        MetricInputError: what `check_visit` raises.
    """
    check_visit(tensors, valid, layout.num_experts, layout.top_k)
    if (reduced := run_kernel(tensors, valid, layout)) is not None:
        return reduced
    context = VisitContext(tensors, valid, layout.num_experts, layout.top_k)
    return pack(families_of(layout), context, layout)


@torch.no_grad()
def reduce_pair(tensors: PairTensors, valid: Tensor | None, layout: Layout) -> Reduced:
    """Partial sums of one transition in one microbatch, on the device of the input.

    Args:
        tensors: residuals of both visits; of the loop step before them for `step_boundary`; the chosen
            experts of both where they are visits of one physical layer.
        valid: [B, S] bool, True for tokens that count; None for all.
        layout: `pair_layout(...)` of this transition.

    Raises:
        MetricInputError: what `check_pair` raises.
    """
    check_pair(tensors, valid)
    if (reduced := run_kernel(tensors, valid, layout)) is not None:
        return reduced
    pieces = [
        pack(families_of(layout), PairContext(piece, mask, layout.num_experts, layout.top_k), layout)
        for piece, mask in _pair_pieces(tensors, valid)
    ]
    if len(pieces) == 1:
        return pieces[0]
    sums = torch.stack([piece.sums for piece in pieces]).sum(0)
    # The pieces are of one microbatch.
    for name in ("filled", "traits"):
        sums[layout.sum_slices[name]].clamp_(max=1)
    return Reduced(sums, pieces[0].maxima)


def _pair_pieces(tensors: PairTensors, valid: Tensor | None) -> Iterator[tuple[PairTensors, Tensor | None]]:
    """Stretches of tokens small enough for the cache (see `PIECE`): everything in a transition adds over tokens."""
    batch, seq, width = tensors.to_residual.shape
    if tensors.to_residual.device.type != "cpu" or batch * seq * width <= PIECE:
        yield tensors, valid
        return
    given: tuple[Any, ...] = (
        tensors.from_residual,
        tensors.to_residual,
        tensors.before_residual,
        tensors.from_topk_idx,
        tensors.to_topk_idx,
        valid,
    )
    flat = [None if x is None else x.reshape(1, batch * seq, *x.shape[2:]) for x in given]
    step = max(1, PIECE // width)
    for start in range(0, batch * seq, step):
        cut: list[Any] = [None if x is None else x[:, start : start + step] for x in flat]
        residuals_and_choices, mask = cut[:-1], cut[-1]
        yield replace(PairTensors(*residuals_and_choices), traits=tensors.traits), mask


@torch.no_grad()
def seal_rank(layout: Layout, reduced: Reduced) -> Reduced:
    """Fill in what belongs to a rank as a whole (its own MaxVio), after its microbatches are merged.

    Called before vectors are merged over ranks; without it the finish takes the only rank's value. No sync.
    """
    if "maxvio_rank" not in layout.max_slices:
        return reduced
    count_E = reduced.sums[layout.sum_slices["count"]]
    total = count_E.sum()
    violation = layout.num_experts * count_E.max() / total.clamp(min=1.0) - 1.0
    maxima = reduced.maxima.clone()
    maxima[layout.max_slices["maxvio_rank"]] = torch.where(
        total > 0, violation, torch.full_like(total, EMPTY)
    )
    return Reduced(reduced.sums, maxima)
