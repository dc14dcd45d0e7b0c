# ruff: noqa: N802 (shape suffixes on the names of tensors)
"""What the partial sums of one visit, or of one pair of visits, share: each intermediate is computed once.

Nothing here reads a value back from the device. Tensors are flattened to N = B·S tokens and widened to
float32 (float64 stays). A token that is not valid may hold NaN: it is dropped with `where`, never by
multiplication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from loopscope.catalog.traits import OPEN_CHOICE
from loopscope.metrics.dense import down, leading_scores, widen
from loopscope.metrics.family import EMPTY
from loopscope.metrics.residual.rows import ResidualRows, residual_rows
from loopscope.metrics.tensors import PairTensors, VisitTensors

if TYPE_CHECKING:
    from functools import cached_property as lazy
else:

    def lazy(compute):
        """`cached_property`, without its lock, which torch.compile cannot trace before Python 3.12."""
        name = compute.__name__

        def get(self: Any) -> Any:
            if name not in self.memo:
                self.memo[name] = compute(self)
            return self.memo[name]

        return property(get, doc=compute.__doc__)


Tensors = TypeVar("Tensors", VisitTensors, PairTensors)


class _Context(Generic[Tensors]):
    """The tensors, and reductions over their valid tokens. What is `lazy` is kept in `memo`."""

    def __init__(
        self,
        tensors: Tensors,
        valid: Tensor | None,
        num_experts: int,
        top_k: int,
        *,
        fusible: bool = False,
    ) -> None:
        self.tensors: Tensors = tensors
        self.valid_N: Bool[Tensor, " N"] | None = None if valid is None else valid.reshape(-1)
        self.num_experts, self.top_k = num_experts, top_k
        self.fusible = fusible
        """True while a compiler traces: write one pass instead of fast eager operations."""
        self.memo: dict[str, Any] = {}

    @lazy
    def tokens(self) -> Float[Tensor, ""]:
        """T, the number of valid tokens, float64."""
        if self.valid_N is None:
            residual = self.tensors.residual
            return torch.full((), residual[..., 0].numel(), dtype=torch.float64, device=residual.device)
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
        lowest = torch.full((), -torch.inf, dtype=x.dtype, device=x.device)
        high = torch.where(self.valid_N, x, lowest).amax().double()
        return torch.where(self.tokens > 0, high, torch.full_like(high, EMPTY))

    def per_expert(self, x: Tensor) -> Tensor:
        """Σ over valid tokens, column by column: [N, E] → float64 [E]."""
        return down(self.keep(x)[None])[0].double()


class VisitContext(_Context[VisitTensors]):
    """Lazily computed intermediates of one visit."""

    def _router(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self.tensors, name)
        return widen(tensor)

    @lazy
    def logits_NE(self) -> Float[Tensor, "N E"]:
        """Raw logits."""
        return self._router("router_logits")

    @lazy
    def logit_max_N(self) -> Float[Tensor, " N"]:
        """Highest logit of each token."""
        return self.logits_NE.amax(-1)

    @lazy
    def logit_min_N(self) -> Float[Tensor, " N"]:
        """Lowest logit of each token."""
        return self.logits_NE.amin(-1)

    @lazy
    def probs_NE(self) -> Float[Tensor, "N E"]:
        """Probabilities over all experts."""
        return self._router("router_probs")

    @lazy
    def weights_NK(self) -> Float[Tensor, "N k"]:
        """Combine weights."""
        return self._router("topk_weights")

    @lazy
    def scores_NE(self) -> Float[Tensor, "N E"]:
        """Choice scores r: the selection scores where given, else the raw logits."""
        return self.logits_NE if self.tensors.selection_scores is None else self._router("selection_scores")

    @lazy
    def raw_idx_NK(self) -> Int[Tensor, "N k"]:
        """Chosen experts as recorded."""
        idx = self.tensors.topk_idx
        assert idx is not None
        return idx.reshape(-1, idx.shape[-1]).long()

    @lazy
    def in_range_NK(self) -> Bool[Tensor, "N k"]:
        """True where a chosen expert exists."""
        return (self.raw_idx_NK >= 0) & (self.raw_idx_NK < self.num_experts)

    @property
    def open_choice(self) -> bool:
        """True where −1 in `topk_idx` stands for no expert."""
        return not OPEN_CHOICE.isdisjoint(self.tensors.traits)

    @lazy
    def idx_NK(self) -> Int[Tensor, "N k"]:
        """Chosen experts, made safe to index with; entries out of range are counted apart."""
        return self.raw_idx_NK.clamp(0, self.num_experts - 1)

    @lazy
    def counted_NK(self) -> Bool[Tensor, "N k"]:
        """Assignments of valid tokens to experts that exist."""
        return self.in_range_NK if self.valid_N is None else self.in_range_NK & self.valid_N[:, None]

    @lazy
    def count_E(self) -> Int[Tensor, " E"]:
        """Assignments per expert, c_e."""
        return self.scatter(self.counted_NK.long())

    def scatter(self, x_NK: Int[Tensor, "N k"]) -> Int[Tensor, " E"]:
        """Σ of an integer per assignment, per expert. Integer addition gives the same bits in any order."""
        zero = torch.zeros(self.num_experts, dtype=torch.int64, device=x_NK.device)
        return zero.scatter_add(0, self.idx_NK.reshape(-1), x_NK.reshape(-1))

    @lazy
    def prob_sum_E(self) -> Float[Tensor, " E"]:
        """Σ_t p_te."""
        return self.per_expert(self.probs_NE)

    @lazy
    def leading_N(self) -> tuple[Tensor, Tensor, Tensor]:
        """r_(1), r_(k) and r_(k+1) of the choice scores, each [N]; see `leading_scores`."""
        return leading_scores(self.scores_NE, self.top_k, fusible=self.fusible)

    @lazy
    def rows(self) -> ResidualRows:
        """What the residual's metrics need of each token and sequence."""
        residual = self.tensors.residual
        valid = None if self.valid_N is None else self.valid_N.reshape(residual.shape[:2])
        return residual_rows(residual, valid, whole=self.fusible or residual.device.type != "cpu")

    @lazy
    def norm_N(self) -> Float[Tensor, " N"]:
        """‖h_t‖."""
        return self.rows.square_N.sqrt()


class PairContext(_Context[PairTensors]):
    """Lazily computed intermediates of a transition."""

    @lazy
    def from_ND(self) -> Float[Tensor, "N d"]:
        """h_from."""
        return widen(self.tensors.from_residual)

    @lazy
    def to_ND(self) -> Float[Tensor, "N d"]:
        """h_to."""
        return widen(self.tensors.to_residual)

    @lazy
    def delta_ND(self) -> Float[Tensor, "N d"]:
        """D = h_to − h_from."""
        return self.to_ND - self.from_ND

    @lazy
    def delta_norm_N(self) -> Float[Tensor, " N"]:
        """‖D‖."""
        return self.delta_ND.square().sum(-1).sqrt()

    @lazy
    def from_norm_N(self) -> Float[Tensor, " N"]:
        """‖h_from‖."""
        return self.from_ND.square().sum(-1).sqrt()

    @lazy
    def to_norm_N(self) -> Float[Tensor, " N"]:
        """‖h_to‖."""
        return self.to_ND.square().sum(-1).sqrt()
