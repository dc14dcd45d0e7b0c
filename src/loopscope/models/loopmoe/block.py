"""One block: attention and MoE, its two auxiliary losses, and everything a trace needs as plain outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.protocols.module import Module

from loopscope.errors import ConfigError
from loopscope.models.loopmoe.router import LoopRouter, RouterOutput

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def load_balancing_loss(
    probs_BSE: Float[Tensor, "B S E"], topk_idx_BSK: Int[Tensor, "B S k"]
) -> Float[Tensor, ""]:
    """Switch load-balancing loss of one visit, ``E · Σ_e f_e · P_e``; 1 when balanced, whatever k is.

    f_e is the share of assignments that expert e received (a count, without gradient), P_e the mean router
    probability. Source: Fedus et al. 2021, Switch Transformers, eq. 4; f is divided by k·T.

    Args:
        probs_BSE: softmax over all experts, float32.
        topk_idx_BSK: the experts really used; distinct per token.

    Returns:
        A float32 scalar with gradient through `probs_BSE`.
    """
    num_experts, top_k = probs_BSE.shape[-1], topk_idx_BSK.shape[-1]
    chosen_BSE = torch.zeros_like(probs_BSE, dtype=torch.bool).scatter_(-1, topk_idx_BSK, True)
    num_tokens = probs_BSE.shape[0] * probs_BSE.shape[1]
    f_E = chosen_BSE.sum(dim=(0, 1)).to(probs_BSE.dtype) / (top_k * num_tokens)
    return num_experts * (f_E * probs_BSE.mean(dim=(0, 1))).sum()


def router_z_loss(logits_BSE: Float[Tensor, "B S E"]) -> Float[Tensor, ""]:
    """Router z-loss of one visit, ``mean_t (logsumexp_e z_te)²``. Source: Zoph et al. 2022, ST-MoE, eq. 5."""
    return torch.logsumexp(logits_BSE.float(), dim=-1).square().mean()


class BlockOutput(NamedTuple):
    """A block always returns all of this, armed or not, so that it compiles to one graph.

    The router tensors are detached: a trace needs no gradient, and detached outputs get no FSDP hooks.
    """

    h_BSD: Tensor
    """The block's output, with gradient."""
    lb_loss: Tensor
    """Load-balancing loss of this visit, a scalar with gradient."""
    z_loss: Tensor
    """Router z-loss of this visit, a scalar with gradient."""
    logits_BSE: Tensor
    """Raw router logits, float32, detached."""
    probs_BSE: Tensor
    """Softmax over all E, float32, detached."""
    topk_idx_BSK: Tensor
    """The experts used, int64."""
    topk_weights_BSK: Tensor
    """Combine weights, float32, detached; sum to 1."""


class LoopMoELayer(Module):
    """Router and routed experts; no tokens dropped, no shared experts, no counters that training changes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Its two parts, which must agree on E and k."""

        router: LoopRouter.Config
        routed_experts: RoutedExperts.Config

        def __post_init__(self) -> None:
            """Refuse parts that disagree."""
            dispatcher = self.routed_experts.token_dispatcher
            experts = self.routed_experts.inner_experts.num_experts
            if not self.router.num_experts == experts == dispatcher.num_experts:
                raise ConfigError(
                    f"router.num_experts is {self.router.num_experts}, inner_experts.num_experts {experts}, "
                    f"token_dispatcher.num_experts {dispatcher.num_experts}; expected one number in all three."
                )
            if self.router.top_k != dispatcher.top_k:
                raise ConfigError(
                    f"router.top_k is {self.router.top_k}, token_dispatcher.top_k {dispatcher.top_k}; "
                    "expected the same number in both."
                )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = config.router.build()
        self.routed_experts = config.routed_experts.build()

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, RouterOutput]:
        """[B, S, d] → ([B, S, d], RouterOutput with gradient)."""
        routing = self.router(x_BSD)
        chosen_BSE = torch.zeros_like(routing.probs_BSE, dtype=torch.bool)
        chosen_BSE.scatter_(-1, routing.topk_idx_BSK, True)
        num_tokens_E = chosen_BSE.sum(dim=(0, 1))
        return self.routed_experts(
            x_BSD, routing.topk_weights_BSK, routing.topk_idx_BSK, num_tokens_E
        ), routing


class LoopMoEBlock(TransformerBlock):
    """Pre-norm attention and MoE with residual connections and residual dropout."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        """torchtitan's block with our MoE layer."""

        moe: LoopMoELayer.Config
        dropout: float = 0.0

        def __post_init__(self) -> None:
            """Refuse a dropout that is not a probability."""
            if not 0.0 <= self.dropout < 1.0:
                raise ConfigError(f"dropout is {self.dropout}, expected 0 <= dropout < 1")

    moe_enabled = True

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.ffn_norm = config.ffn_norm.build()
        self.moe = config.moe.build()
        self.dropout = config.dropout

    def forward(
        self, h_BSD: Tensor, attention_masks: AttentionMasksType | None, positions: Tensor | None = None
    ) -> BlockOutput:
        """[B, S, d] → BlockOutput. Pure: it records nothing and keeps nothing."""
        attended_BSD = self.attention(self.attention_norm(h_BSD), attention_masks, positions)
        h_BSD = h_BSD + F.dropout(attended_BSD, self.dropout, self.training)
        mixed_BSD, routing = self.moe(self.ffn_norm(h_BSD))
        h_BSD = h_BSD + F.dropout(mixed_BSD, self.dropout, self.training)
        return BlockOutput(
            h_BSD,
            load_balancing_loss(routing.probs_BSE, routing.topk_idx_BSK),
            router_z_loss(routing.logits_BSE),
            routing.logits_BSE.detach(),
            routing.probs_BSE.detach(),
            routing.topk_idx_BSK,
            routing.topk_weights_BSK.detach(),
        )
