"""The masks that are drawn: the arguments by which a batch says its padding, in every form that people write."""

from __future__ import annotations

from collections.abc import Mapping

import torch

SIMPLE = ("none", "right", "left", "empty row")
SQUARE = (
    "4d-right",
    "4d-right-self",
    "4d-left-self",
    "4d-left-all",
    "4d-right-added",
    "4d-left-added",
)
"""[B, 1, S, S]. A padding query sees nobody else (`self`), everybody (`all`), or nothing more than causality
and padding leave it. `added`: to the scores."""
PACKED = "packed"


def is_left(mask: str) -> bool:
    """Padding stands before the tokens."""
    return "left" in mask


def validity(mask: str, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """[B, S]: tokens that are no padding, at least two of each sequence."""
    if mask in ("none", PACKED):
        return torch.ones(size, length, dtype=torch.bool)
    padding = torch.randint(0, length - 1, (size,), generator=generator)
    if (
        mask == "4d-right-self"
    ):  # one token of padding at the end looks as the last one of a whole sequence does
        padding[padding == 1] = 0
    if mask == "empty row":
        padding[0] = length if size > 1 else 0
    at = torch.arange(length)
    return at >= padding[:, None] if is_left(mask) else at < length - padding[:, None]


def arguments(mask: str, valid: torch.Tensor, dtype: torch.dtype, added: bool) -> Mapping[str, torch.Tensor]:
    """What the forward is given.

    Args:
        mask: its name.
        valid: [B, S] bool.
        dtype: of a mask that is added to the scores.
        added: whether the attention takes no other square masks.
    """
    if mask == "none":
        return {}
    if mask == PACKED:
        size, length = valid.shape
        cut = length // 2
        return {
            "position_ids": torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(size, length)
        }
    if mask in SIMPLE:
        return {"attention_mask": valid.long()}
    seen = square(mask, valid)
    if added or mask.endswith("added"):
        zeros = torch.zeros(seen.shape, dtype=dtype)
        return {"attention_mask": zeros.masked_fill(~seen, torch.finfo(dtype).min)}
    return {"attention_mask": seen}


def square(mask: str, valid: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, S] bool: causal, padding seen by nobody that is none."""
    length = valid.shape[1]
    padding = ~valid
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    seen = causal & valid[:, None, :]
    alone = torch.eye(length, dtype=torch.bool) & padding[:, :, None]
    if mask.endswith("self"):
        seen = seen | alone
    elif mask.endswith(("all", "added")):  # as transformers does where a query would see nothing
        seen = seen | ~seen.any(-1, keepdim=True)
    return seen[:, None]
