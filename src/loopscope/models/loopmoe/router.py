"""Softmax top-k router that also hands over what a trace needs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from loopscope.errors import ConfigError


class RouterOutput(NamedTuple):
    """What one routing decision consists of; all float32 but the indices."""

    logits_BSE: Tensor
    """Raw gate output."""
    probs_BSE: Tensor
    """Softmax over all E."""
    topk_idx_BSK: Tensor
    """The experts used, int64, by falling logit."""
    topk_weights_BSK: Tensor
    """Combine weights; sum to 1 over k."""


class RouterGate(Linear):
    """The gate's matmul in float32, whatever the parameter dtype.

    A gate that runs in bfloat16 gives tied logits (spacing 0.25 at 50), and ties decide the choice by index.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As `Linear.Config`."""

    def forward(self, input: Tensor) -> Tensor:
        """[B, S, d] in any float dtype → float32 logits [B, S, E]."""
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class LoopRouter(TokenChoiceTopKRouter):
    """Float32 softmax over all experts, top k, renormalised weights, nothing dropped."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """As torchtitan's, with the settings of this router fixed: softmax, renormalised, no groups."""

        score_func: str = "softmax"
        route_norm: bool = True

        def __post_init__(self) -> None:
            """Refuse what this router does not do."""
            for fits, message in (
                (
                    1 <= self.top_k <= self.num_experts,
                    f"top_k is {self.top_k} with num_experts {self.num_experts}; expected "
                    "1 <= top_k <= num_experts: a token cannot choose more experts than there are.",
                ),
                (
                    self.score_func == "softmax" and self.route_norm,
                    f"LoopRouter got score_func={self.score_func!r}, route_norm={self.route_norm}; it is a "
                    "softmax router with renormalised weights. For others use TokenChoiceTopKRouter.",
                ),
                (
                    self.num_expert_groups is None and self.route_scale == 1.0,
                    f"LoopRouter got num_expert_groups={self.num_expert_groups}, "
                    f"route_scale={self.route_scale}; expected None and 1.0: it has no group-limited "
                    "routing and no scale.",
                ),
            ):
                if not fits:
                    raise ConfigError(message)

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> RouterOutput:
        """[B, S, d] → RouterOutput. There is no expert bias in this router."""
        logits_BSE = self.gate(x_BLD)
        probs_BSE = F.softmax(logits_BSE, dim=-1)
        if self._debug_force_load_balance:
            idx_BSK, chosen_BSK = self._debug_force_load_balance_routing(probs_BSE)
        else:
            # Chosen by logit: softmax underflow would tie what the logits still tell apart.
            idx_BSK = torch.topk(logits_BSE, k=self.top_k, dim=-1).indices
            chosen_BSK = probs_BSE.gather(-1, idx_BSK)
        # The chosen probabilities sum to at least 1/E unless balance was forced, where they can underflow.
        weights_BSK = chosen_BSK / chosen_BSK.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        return RouterOutput(logits_BSE, probs_BSE, idx_BSK, weights_BSK)
