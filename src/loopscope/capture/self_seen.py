"""Tokens that see themselves and that nobody else sees: padding, or sequences of one token."""

import torch
from torch import Tensor


def self_seen(visible: Tensor, length: int) -> Tensor:
    """[B, S] bool: tokens of which a square mask alone does not say whether they are padding.

    Where a padding query would see nothing, people let it see itself, so that its softmax is finite. Such a token sees
    nobody else, or it sees the tokens before it while later ones see those and pass it over. A sequence of one token
    looks the same, unless the batch has padding that nobody sees. The last token of a longer sequence does not: who
    comes behind it sees nothing of the sequence.

    Args:
        visible: [B, ..., Q, K] bool, whom each query sees.
        length: S; cached keys come first.
    """
    if length < 2 or visible.ndim < 3 or visible.shape[-2] != length:
        return visible.new_zeros(visible.shape[0], length)
    seen = visible.reshape(visible.shape[0], -1, *visible.shape[-2:]).any(dim=1)
    hidden = ~seen[..., -length:].any(dim=-2)  # padding that does not even see itself
    own = torch.eye(length, dtype=torch.bool, device=seen.device)
    keys = seen[..., -length:]
    others = keys & ~own
    alone = keys.diagonal(dim1=-2, dim2=-1) & ~others.any(dim=-2)
    sees = others.any(dim=-1) | seen[..., :-length].any(dim=-1)
    behind = keys.flip(-2).to(torch.uint8).cummax(dim=-2).values.flip(-2)  # by whom from here on
    later = torch.cat([behind[:, 1:], torch.zeros_like(behind[:, :1])], dim=1).bool()
    passed_over = (others & later).any(dim=-1)
    return alone & (~sees | passed_over) & ~hidden.any()
