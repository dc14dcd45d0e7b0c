from __future__ import annotations

import pytest
import torch

from loopscope.capture.chunks import in_chunks, tokens_given

NESTED = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)], layout=torch.jagged)
IDS, VECTORS, SCALES = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 6, 4), torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ((IDS,), {}, 16),
        ((VECTORS, IDS), {}, 12),
        ((SCALES, IDS), {}, 16),  # floats [B, S] are no vectors
        ((), {"labels": IDS, "inputs_embeds": VECTORS}, 12),
        ((), {"batch": IDS}, 16),
        ((SCALES,), {}, None),
        ((NESTED,), {}, None),
        ((), {}, None),
        (("text",), {"flag": True}, None),
    ],
)
def test_tokens_of_a_forward(args: tuple[object, ...], kwargs: dict[str, object], tokens: int | None) -> None:
    assert tokens_given(args, kwargs) == tokens


@pytest.mark.parametrize(
    ("calls", "given", "parts"),
    [
        ([8, 8], 16, True),
        ([10, 6], 16, True),
        ([8, 8, 8, 8], 16, True),  # two passes over two halves
        ([16, 16], 16, False),
        ([8], 16, False),  # fewer tokens, once: a pooled sequence
        ([8, 8, 8], 16, False),
        ([8, 8], None, False),
        ([], 16, False),
    ],
)
def test_parts_together_are_the_whole(calls: list[int], given: int | None, parts: bool) -> None:
    assert in_chunks(calls, given) is parts
