"""Which tokens are padding: [B, S] from whatever attention mask a model is given."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from loopscope.capture.errors import ReconcileError
from loopscope.capture.self_seen import self_seen
from loopscope.trace import TracePoint

_NO_LONGER_A_BIAS = -1e3
"""An additive mask hides a key below this; learned and linear position biases stay above it for some query."""

_QUERIES = 1024
"""Queries of a block mask that are looked at together."""

FIX = (
    "Pass valid=function (of the forward's positional and keyword arguments) that gives [B, S] bool, True for tokens "
    "that count, or None where all do."
)


class MaskError(ReconcileError):
    """Nobody can tell from the mask which tokens are padding."""


def key_validity(mask: Any, shape: tuple[int, int], where: str = "attention_mask") -> Tensor | None:
    """Tokens that some query may see; a key that none may see is padding.

    Args:
        mask: of a batch [B, K], of queries [Q, K], or with any dimensions between batch and keys ([B, Q, K],
            [B, H, Q, K], [B*H, Q, K], [B, 1, 1, K]). Boolean and integer masks are true where a token takes part;
            floating ones are added to the scores where they hold anything negative. Keys beyond S are cached ones, and
            come first. A `BlockMask` of flex attention; or a mapping of such masks, of which one that sees a token is
            enough.
        shape: (B, S) of the residual.
        where: the argument's name, for messages.

    Returns:
        [B, S] bool; None where there is no mask, so that every token counts.

    Raises:
        MaskError: the mask fits no such shape, or two readings of it.
    """
    if mask is None:
        return None
    if isinstance(mask, Mapping):
        parts = [key_validity(part, shape, f"{where}[{name!r}]") for name, part in mask.items()]
        known = [part for part in parts if part is not None]
        return torch.stack(known).any(dim=0) if known else None
    if hasattr(mask, "mask_mod") and hasattr(mask, "seq_lengths"):
        return _of_block_mask(mask, shape, where)
    if not isinstance(mask, Tensor):
        raise MaskError(f"{where} is a {type(mask).__name__}, whose padding cannot be read. {FIX}")
    mask = (mask.to_local() if hasattr(mask, "to_local") else mask).detach()
    batch, length = shape
    if mask.ndim == 0 or mask.is_complex() or mask.shape[-1] < length:
        raise _unfit(where, mask, shape)
    visible = takes_part(mask)
    if mask.ndim == 1 or (mask.ndim == 2 and _is_of_queries(visible, shape, where)):
        visible = visible[None]
    if visible.shape[0] not in (1, batch):
        if visible.ndim != 3 or visible.shape[0] % batch:
            raise _unfit(where, mask, shape)
        visible = visible.reshape(batch, -1, *visible.shape[1:])
    if visible.ndim > 2:
        visible = _of_real_queries(visible)
        if count := int(self_seen(visible, length).sum()):
            raise MaskError(
                f"{where} {list(mask.shape)}: {count} tokens see themselves and are seen by no other. They are "
                f"padding, or sequences of one token; the mask does not say which. {FIX}"
            )
        visible = visible.flatten(1, -2).any(dim=1)
    return visible[:, -length:].expand(batch, length)


def fitting(mask: Any, points: Sequence[TracePoint]) -> Any:
    """The mask of a user's own function as [B, S] bool.

    Raises:
        MaskError: it is not of the shape of the visits.
    """
    if isinstance(mask, Tensor) and (mask.is_floating_point() or mask.is_complex()):
        raise MaskError(
            f"valid= gave {mask.dtype}, expected bool, True for tokens that count. A mask that is added to scores is "
            "0 where a token counts: return mask == 0."
        )
    for point in points:
        shape = tuple(point.residual.shape[:2])
        if isinstance(mask, Tensor) and "flat" in point.traits and mask.numel() == shape[1]:
            continue  # the batch's sequences one behind the other
        if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise MaskError(
                f"valid= gave {got}, expected [B, S] = {list(shape)} of the residual, bool, True for tokens that count."
            )
    return mask.bool()


def takes_part(mask: Tensor) -> Tensor:
    """A mask as bool, True where a query may see a key. No value is read from the device."""
    if not mask.is_floating_point():
        return mask != 0
    # Added to the scores, unless it is 0 and 1.
    added = (mask < 0).any() | (mask == 0).all() & torch.tensor(mask.ndim > 2, device=mask.device)
    return torch.where(added, mask > _NO_LONGER_A_BIAS, mask > 0)


def is_causal(visible: Tensor) -> bool:
    """True where a [S, S] mask lets each query see itself and nothing that comes later."""
    if visible.shape[0] != visible.shape[1] or len(visible) < 2 or visible.is_floating_point():
        return False
    return bool((visible == visible.tril()).all() & visible.diagonal().all())


def valid_lengths(cumulative: Tensor, shape: tuple[int, int]) -> Tensor:
    """[B, S] bool of packed sequences: what lies past the last one is padding.

    Args:
        cumulative: ``cu_seqlens`` [n + 1], over the tokens of the whole batch.
        shape: (B, S) of the residual.
    """
    batch, length = shape
    position = torch.arange(batch * length, device=cumulative.device)
    return (position < cumulative.reshape(-1)[-1]).reshape(batch, length)


def _is_of_queries(visible: Tensor, shape: tuple[int, int], where: str) -> bool:
    batch, length = shape
    rows = visible.shape[0]
    if rows == 1 or rows not in (batch, length):
        if rows not in (1, batch, length):
            raise _unfit(where, visible, shape)
        return False
    if rows != batch:
        return True
    if is_causal(visible):
        raise MaskError(
            f"{where} is [{rows}, {visible.shape[1]}], which may be of a batch or of queries where B is S. {FIX}"
        )
    return False


def _of_real_queries(visible: Tensor) -> Tensor:
    """[B, ..., Q, K] without what padding sees. A query that may see nothing is often let see everything, so that its
    softmax is finite: where others see less, what it alone sees is padding. The last one of a causal mask sees all by
    right."""
    sees_all = visible.all(dim=-1, keepdim=True)
    by_right = sees_all.all(dim=-2, keepdim=True)
    last = torch.arange(visible.shape[-2], device=visible.device)[:, None] == visible.shape[-2] - 1
    return visible & (~sees_all | by_right | last)


def _of_block_mask(mask: Any, shape: tuple[int, int], where: str) -> Tensor:
    batch, length = shape
    queries, keys = mask.seq_lengths
    if keys < length or mask.shape[0] not in (1, batch):
        raise MaskError(
            f"{where} is a BlockMask of {tuple(mask.shape)}, expected the residual's [{batch}, {length}]. {FIX}"
        )
    device = mask.kv_num_blocks.device
    b = torch.arange(batch, device=device)[:, None, None]
    if mask.shape[0] == 1:
        b = torch.zeros_like(b)
    key = torch.arange(keys - length, keys, device=device)
    seen = torch.zeros(batch, length, dtype=torch.bool, device=device)
    for head in range(mask.shape[1]):
        h = torch.tensor(head, device=device)
        for start in range(0, queries, _QUERIES):
            query = torch.arange(start, min(start + _QUERIES, queries), device=device)[:, None]
            seen |= torch.as_tensor(mask.mask_mod(b, h, query, key)).expand(batch, len(query), length).any(1)
    return seen


def _unfit(where: str, mask: Tensor, shape: tuple[int, int]) -> MaskError:
    return MaskError(
        f"{where} is {list(mask.shape)}, which does not fit the residual's [B, S] = {list(shape)}; expected [B, S], or "
        f"a mask whose last dimension is the keys. {FIX}"
    )
