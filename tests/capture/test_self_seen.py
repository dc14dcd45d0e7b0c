"""A square mask in which padding sees itself does not say what is padding; no other mask is refused for that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopscope.capture.masks import MaskError, key_validity
from loopscope.capture.self_seen import self_seen

LENGTH = 6
CAUSAL = torch.ones(LENGTH, LENGTH).tril().bool()
EYE = torch.eye(LENGTH).bool()


def packed(*sizes: int) -> Tensor:
    """[1, S, S]: causal within each sequence."""
    of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return (CAUSAL & (of[:, None] == of))[None]


def padded(valid: list[int]) -> Tensor:
    """[1, S, S]: causal, padding seen by itself alone."""
    return (CAUSAL & torch.tensor(valid).bool() | EYE)[None]


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL[None],
        torch.ones(1, LENGTH, LENGTH).bool(),
        packed(3, 3),
        packed(2, 4),
        (CAUSAL & ~torch.ones(LENGTH, LENGTH).tril(-3).bool())[None],
        torch.ones(1, 1, LENGTH).bool(),
        torch.ones(1, 1, 1).bool(),
    ],
    ids=["causal", "full", "packed", "packed otherwise", "window", "of keys", "one token"],
)
def test_masks_that_say_it(mask: Tensor) -> None:
    length = mask.shape[-1]
    assert not self_seen(mask, length).any()
    known = key_validity(mask[:, None], (1, length))
    assert known is not None
    assert known.all()


@pytest.mark.parametrize(
    ("mask", "unsure"),
    [
        (padded([0, 0, 1, 1, 1, 1]), [0, 1]),
        (padded([0, 1, 1, 1, 1, 1]), [0]),
        (padded([1, 1, 1, 1, 0, 0]), [4]),
        (packed(1, 5), [0]),
        (packed(2, 1, 3), [2]),
    ],
    ids=["left", "left, one", "right", "sequence of one", "the same within"],
)
@pytest.mark.parametrize("added", [False, True], ids=["bool", "added to scores"])
def test_masks_that_do_not(mask: Tensor, unsure: list[int], added: bool) -> None:
    assert self_seen(mask, LENGTH)[0].nonzero().flatten().tolist() == unsure
    given = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")) if added else mask
    with pytest.raises(
        MaskError, match=f"{len(unsure)} tokens see themselves and are seen by no other.*Pass valid="
    ):
        key_validity(given[:, None], (1, LENGTH))


def test_a_batch_with_padding_that_nobody_sees_has_sequences_of_one_token() -> None:
    valid = torch.tensor([0, 1, 1, 1, 1, 1]).bool()
    mask = packed(2, 1, 3) & valid & valid[:, None]
    known = key_validity(mask[:, None], (1, LENGTH))
    assert known is not None
    assert known[0].equal(valid)


@pytest.mark.parametrize("padding", [1, 2, 5])
def test_padding_that_is_let_see_everything_is_no_sequence(padding: int) -> None:
    valid = torch.arange(LENGTH) >= padding
    seen = CAUSAL & valid
    mask = seen | ~seen.any(-1, keepdim=True)
    known = key_validity(mask[None, None], (1, LENGTH))
    assert known is not None
    assert known[0].equal(valid)


def test_cached_keys_are_others_too() -> None:
    cached = torch.ones(1, 1, LENGTH, 2).bool()
    mask = torch.cat([cached, EYE[None, None]], dim=-1)  # everyone sees the cache and itself
    known = key_validity(mask, (1, LENGTH))
    assert known is not None
    assert known.all()
