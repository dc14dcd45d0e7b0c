"""Padding from every kind of attention mask, against the mask that it was built from."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from loopscope.capture.masks import MaskError, is_causal, key_validity, valid_lengths

B, S = 3, 7
RIGHT = torch.arange(S) < torch.tensor([[S], [5], [2]])
LEFT = RIGHT.flip(1)
CAUSAL = torch.ones(S, S).tril().bool()
WINDOW = CAUSAL & ~torch.ones(S, S).tril(-3).bool()


def _additive(visible: torch.Tensor, low: float = -torch.inf) -> torch.Tensor:
    return torch.where(visible, 0.0, low)


KINDS: dict[str, Any] = {
    "bool": lambda v: v,
    "ids of packed sequences": lambda v: v * torch.arange(1, S + 1),
    "0 and 1": lambda v: v.float(),
    "added": _additive,
    "cached keys before": lambda v: torch.cat([torch.ones(B, 2).bool(), v], 1),
    "[B, 1, 1, K]": lambda v: v[:, None, None],
    "[B, 1, Q, K] bidirectional": lambda v: v[:, None, None].expand(B, 1, S, S),
    "[B, 1, Q, K] causal": lambda v: v[:, None, None] & CAUSAL,
    "[B, Q, K] causal": lambda v: v[:, None] & CAUSAL,
    "[B*H, Q, K] causal": lambda v: (v[:, None, None] & CAUSAL).expand(B, 4, S, S).flatten(0, 1),
    "causal, 0 and 1": lambda v: (v[:, None, None] & CAUSAL).float(),
    "causal, added, -1e4": lambda v: _additive(v[:, None, None] & CAUSAL, -1e4).half(),
    "causal, added to a bias": lambda v: _additive(v[:, None, None] & CAUSAL, -1e9) + torch.randn(B, 2, S, S),
    "causal in bf16": lambda v: _additive(v[:, None, None] & CAUSAL, torch.finfo(torch.bfloat16).min).bfloat16(),
    "causal, sliding window": lambda v: v[:, None, None] & WINDOW,
    "blind queries see all": lambda v: (m := v[:, None, None] & CAUSAL) | ~m.any(-1, keepdim=True),
    "a mapping": lambda v: {"full_attention": v[:, None, None] & CAUSAL, "sliding_attention": None},
    "a mapping of several": lambda v: {"full": v[:, None, None] & CAUSAL, "sliding": v[:, None, None] & WINDOW},
    "packed in blocks": lambda v: v[:, None, None] & CAUSAL & (torch.arange(S) // 2 == torch.arange(S)[:, None] // 2),
}  # fmt: skip


@pytest.mark.parametrize("valid", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_found(kind: str, valid: torch.Tensor) -> None:
    torch.manual_seed(0)
    assert torch.equal(key_validity(KINDS[kind](valid), (B, S)), valid)


@pytest.mark.parametrize("valid", [RIGHT, LEFT], ids=["right", "left"])
def test_padding_is_found_in_a_block_mask(valid: torch.Tensor) -> None:
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & valid[b, k], B, None, S, S, device="cpu")
    assert torch.equal(key_validity(mask, (B, S)), valid)
    packed = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q // 2 == k // 2), None, None, S, S, device="cpu"
    )
    assert key_validity(packed, (B, S)).all()


@pytest.mark.parametrize(
    "mask",
    [
        None, torch.ones(B, S), CAUSAL, CAUSAL[None, None], _additive(CAUSAL), torch.zeros(B, 1, S, S), torch.ones(S),
        -300.0 * (torch.arange(S) - torch.arange(S)[:, None]).abs().expand(B, 2, S, S), {"full_attention": None},
    ],
    ids=["none", "ones", "causal", "causal 4d", "causal added", "zeros added", "one row", "linear bias", "mapping"],
)  # fmt: skip
def test_nothing_is_padding(mask: Any) -> None:
    found = key_validity(mask, (B, S))
    assert found is None or (found.shape == (B, S) and found.all())


@pytest.mark.parametrize(
    "mask",
    [torch.ones(B, S - 1), torch.ones(2, S), torch.ones(5, 4, S, S), torch.tensor(1), object(), "causal"],
    ids=["too short", "another batch", "another batch 4d", "scalar", "object", "text"],
)
def test_what_fits_nothing_is_refused_with_the_fix(mask: Any) -> None:
    with pytest.raises(MaskError, match=r"valid="):
        key_validity(mask, (B, S))


def test_a_square_that_could_be_a_batch_or_queries_is_refused() -> None:
    square = torch.ones(4, 4).tril().bool()
    assert is_causal(square)
    with pytest.raises(MaskError, match="B is S"):
        key_validity(square, (4, 4))
    assert key_validity(torch.ones(4, 4), (4, 4)).all()


def test_what_lies_past_the_last_packed_sequence_is_padding() -> None:
    valid = valid_lengths(torch.tensor([0, 3, 5]), (1, 8))
    assert valid.tolist() == [[True] * 5 + [False] * 3]
