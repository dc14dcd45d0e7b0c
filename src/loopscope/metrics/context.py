# ruff: noqa: N802 (shape suffixes on the names of tensors)
"""What the partial sums of one visit, or of one pair of visits, share: each intermediate is computed once.

Nothing here reads a value back from the device. Tensors are flattened to N = B·S tokens and widened to
float32 (float64 stays). A token that is not valid may hold NaN: it is dropped with `where`, never by
multiplication.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from loopscope.metrics.partials import EMPTY
from loopscope.metrics.tensors import PairTensors, VisitTensors


def widen(x: Tensor) -> Tensor:
    """[B, S, F] → [N, F] in float32 or wider."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.dtype == torch.float64 else flat.float()


class _Masked:
    """Reductions over the valid tokens."""

    def __init__(self, valid: Tensor | None, num_tokens: int, device: torch.device) -> None:
        self.valid_N: Bool[Tensor, " N"] | None = None if valid is None else valid.reshape(-1)
        self._num_tokens = num_tokens
        self._device = device

    @cached_property
    def tokens(self) -> Float[Tensor, ""]:
        """T, the number of valid tokens, float64."""
        if self.valid_N is None:
            return torch.full((), self._num_tokens, dtype=torch.float64, device=self._device)
        return self.valid_N.sum().double()

    def keep(self, x: Tensor) -> Tensor:
        """[N] or [N, F] with tokens that do not count set to zero."""
        if self.valid_N is None:
            return x
        valid = self.valid_N if x.ndim == 1 else self.valid_N[:, None]
        return torch.where(valid, x, torch.zeros((), dtype=x.dtype, device=x.device))

    def total(self, x: Tensor) -> Tensor:
        """Σ over valid tokens of a value per token: [N] → float64 scalar."""
        return self.keep(x).double().sum()

    def highest(self, x: Tensor) -> Tensor:
        """Maximum over valid tokens of a value per token: [N] → float64 scalar; `EMPTY` without any."""
        if self.valid_N is None:
            return x.amax().double()
        low = (
            torch.where(self.valid_N, x, torch.full((), -torch.inf, dtype=x.dtype, device=x.device))
            .amax()
            .double()
        )
        return torch.where(self.tokens > 0, low, torch.full_like(low, EMPTY))

    def per_expert(self, x: Tensor) -> Tensor:
        """Σ over valid tokens, column by column: [N, E] → float64 [E]."""
        return self.keep(x).sum(0).double()


class VisitContext(_Masked):
    """Lazily computed intermediates of one visit."""

    def __init__(self, tensors: VisitTensors, valid: Tensor | None, num_experts: int, top_k: int) -> None:
        residual = tensors.residual
        super().__init__(valid, residual.shape[0] * residual.shape[1], residual.device)
        self.tensors = tensors
        self.num_experts = num_experts
        self.top_k = top_k

    def _router(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self.tensors, name)
        return widen(tensor)

    @cached_property
    def logits_NE(self) -> Float[Tensor, "N E"]:
        """Raw logits."""
        return self._router("router_logits")

    @cached_property
    def probs_NE(self) -> Float[Tensor, "N E"]:
        """Probabilities over all experts."""
        return self._router("router_probs")

    @cached_property
    def weights_NK(self) -> Float[Tensor, "N k"]:
        """Combine weights."""
        return self._router("topk_weights")

    @cached_property
    def scores_NE(self) -> Float[Tensor, "N E"]:
        """Choice scores r: the selection scores where given, else the raw logits."""
        return self.logits_NE if self.tensors.selection_scores is None else self._router("selection_scores")

    @cached_property
    def raw_idx_NK(self) -> Int[Tensor, "N k"]:
        """Chosen experts as recorded."""
        idx = self.tensors.topk_idx
        assert idx is not None
        return idx.reshape(-1, idx.shape[-1]).long()

    @cached_property
    def in_range_NK(self) -> Bool[Tensor, "N k"]:
        """True where a chosen expert exists."""
        return (self.raw_idx_NK >= 0) & (self.raw_idx_NK < self.num_experts)

    @cached_property
    def idx_NK(self) -> Int[Tensor, "N k"]:
        """Chosen experts, made safe to index with; entries out of range are counted apart."""
        return self.raw_idx_NK.clamp(0, self.num_experts - 1)

    @cached_property
    def counted_NK(self) -> Bool[Tensor, "N k"]:
        """Assignments of valid tokens to experts that exist."""
        return self.in_range_NK if self.valid_N is None else self.in_range_NK & self.valid_N[:, None]

    @cached_property
    def count_E(self) -> Int[Tensor, " E"]:
        """Assignments per expert, c_e."""
        return self.scatter(self.counted_NK.long())

    def scatter(self, x_NK: Int[Tensor, "N k"]) -> Int[Tensor, " E"]:
        """Σ of an integer per assignment, per expert. Integer addition gives the same bits in any order."""
        zero = torch.zeros(self.num_experts, dtype=torch.int64, device=x_NK.device)
        return zero.scatter_add(0, self.idx_NK.reshape(-1), x_NK.reshape(-1))

    @cached_property
    def prob_sum_E(self) -> Float[Tensor, " E"]:
        """Σ_t p_te."""
        return self.per_expert(self.probs_NE)

    @cached_property
    def top_scores_NK1(self) -> Float[Tensor, "N k1"]:
        """The min(k + 1, E) highest choice scores of each token, falling."""
        return torch.topk(self.scores_NE, min(self.top_k + 1, self.num_experts), dim=-1).values

    @cached_property
    def residual_ND(self) -> Float[Tensor, "N d"]:
        """The block's output."""
        return widen(self.tensors.residual)

    @cached_property
    def square_N(self) -> Float[Tensor, " N"]:
        """‖h_t‖²."""
        return self.residual_ND.square().sum(-1)

    @cached_property
    def norm_N(self) -> Float[Tensor, " N"]:
        """‖h_t‖."""
        return self.square_N.sqrt()


class PairContext(_Masked):
    """Lazily computed intermediates of a transition."""

    def __init__(self, tensors: PairTensors, valid: Tensor | None, num_experts: int, top_k: int) -> None:
        residual = tensors.to_residual
        super().__init__(valid, residual.shape[0] * residual.shape[1], residual.device)
        self.tensors = tensors
        self.num_experts = num_experts
        self.top_k = top_k

    @cached_property
    def from_ND(self) -> Float[Tensor, "N d"]:
        """h_from."""
        return widen(self.tensors.from_residual)

    @cached_property
    def to_ND(self) -> Float[Tensor, "N d"]:
        """h_to."""
        return widen(self.tensors.to_residual)

    @cached_property
    def delta_ND(self) -> Float[Tensor, "N d"]:
        """D = h_to − h_from."""
        return self.to_ND - self.from_ND

    @cached_property
    def delta_norm_N(self) -> Float[Tensor, " N"]:
        """‖D‖."""
        return self.delta_ND.square().sum(-1).sqrt()

    @cached_property
    def from_norm_N(self) -> Float[Tensor, " N"]:
        """‖h_from‖."""
        return self.from_ND.square().sum(-1).sqrt()

    @cached_property
    def to_norm_N(self) -> Float[Tensor, " N"]:
        """‖h_to‖."""
        return self.to_ND.square().sum(-1).sqrt()
