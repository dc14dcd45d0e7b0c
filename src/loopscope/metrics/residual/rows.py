"""One walk over a block's output: what each token and each sequence needs of it, a piece in cache at a time."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from loopscope.metrics.dense import TINY, bad_entries, down, widen

PIECE = 2**16
"""Entries of a piece. Eager intermediates of this size stay in cache and in the allocator's reach; whole ones
cost a page fault per page (measured: 5 times the walk itself)."""


class ResidualRows(NamedTuple):
    """Per token and per sequence."""

    square_N: Float[Tensor, " N"]
    """‖h_t‖²."""
    abs_max_N: Float[Tensor, " N"]
    """max |h_t|."""
    bad_N: Float[Tensor, " N"]
    """Non-finite entries."""
    unit_sum_BD: Float[Tensor, "B d"]
    """Σ_t h_t/‖h_t‖ over the valid tokens of a sequence whose norm is not below 1e-12, float64."""


def residual_rows(
    residual_BSD: Float[Tensor, "B S d"], valid_BS: Bool[Tensor, "B S"] | None, *, whole: bool
) -> ResidualRows:
    """Walk over the residual in pieces, or as a whole where a compiler or a GPU does the walking."""
    batch, seq, width = residual_BSD.shape
    pieces = [(0, batch, 0, seq)] if whole else _pieces(batch, seq, width)
    tokens: list[tuple[Tensor, Tensor, Tensor]] = []
    sums: list[list[Tensor]] = []
    for first, last, start, stop in pieces:
        valid = None if valid_BS is None else valid_BS[first:last, start:stop]
        *of_tokens, unit_sum = _piece(residual_BSD[first:last, start:stop], valid, whole)
        tokens.append(tuple(of_tokens))  # type: ignore[arg-type]
        if start == 0:
            sums.append([])
        sums[-1].append(unit_sum)
    square, abs_max, bad = (
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*tokens, strict=True)
    )
    of_sequences = [torch.stack(parts).sum(0) if len(parts) > 1 else parts[0] for parts in sums]
    return ResidualRows(
        square, abs_max, bad, torch.cat(of_sequences) if len(of_sequences) > 1 else of_sequences[0]
    )


def _piece(h_BSD: Tensor, valid_BS: Tensor | None, fusible: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h_ND = widen(h_BSD)
    square_N = h_ND.square().sum(-1)
    norm_N = square_N.sqrt()
    counts_N = norm_N >= TINY if valid_BS is None else (norm_N >= TINY) & valid_BS.reshape(-1)
    nothing = torch.zeros((), dtype=h_ND.dtype, device=h_ND.device)
    # A NaN norm must not be taken for a small one: it has to spoil the sum.
    spoiled_N = norm_N.isnan() if valid_BS is None else norm_N.isnan() & valid_BS.reshape(-1)
    scale_N = torch.where(counts_N | spoiled_N, norm_N.reciprocal(), nothing)
    unit_ND = h_ND * scale_N[:, None]
    if valid_BS is not None:  # a padded token may hold NaN, which zero does not cancel
        unit_ND = torch.where(valid_BS.reshape(-1)[:, None], unit_ND, nothing)
    return (
        square_N,
        h_ND.abs().amax(-1),
        bad_entries(h_ND, fusible=fusible),
        down(unit_ND.reshape(h_BSD.shape)).double(),
    )


def _pieces(batch: int, seq: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """(first, last, start, stop) of whole sequences, or of stretches of one sequence where it is long."""
    rows = max(1, PIECE // width)
    if seq <= rows:
        step = rows // seq
        yield from ((first, min(first + step, batch), 0, seq) for first in range(0, batch, step))
        return
    for b in range(batch):
        yield from ((b, b + 1, start, min(start + rows, seq)) for start in range(0, seq, rows))
