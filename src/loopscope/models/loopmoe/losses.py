"""The two auxiliary losses of the reference model, as the objective uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


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
    P_E = probs_BSE.mean(dim=(0, 1))
    return num_experts * (f_E * P_E).sum()


def router_z_loss(logits_BSE: Float[Tensor, "B S E"]) -> Float[Tensor, ""]:
    """Router z-loss of one visit, ``mean_t (logsumexp_e z_te)²``. Source: Zoph et al. 2022, ST-MoE, eq. 5."""
    return torch.logsumexp(logits_BSE.float(), dim=-1).square().mean()
