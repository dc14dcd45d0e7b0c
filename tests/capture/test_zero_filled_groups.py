"""Groups that were not kept get 0 in some models: where a kept group has a negative score, an expert of another one is
chosen over it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopscope.capture import ReconcileError, RoutingSpec, reconcile
from loopscope.capture.proof import Routing
from loopscope.capture.scores import ranking_scores, scores_of

SPEC = RoutingSpec(
    num_experts=8, top_k=2, score_func="sigmoid", order="score_then_topk", normalised=True,
    balancing="probability_bias", num_groups=2, groups_per_token=1,
)  # fmt: skip
TOKENS = 64


def routed(fill: float) -> tuple[Routing, Tensor]:
    """As such a model routes, and which tokens use two groups."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, 8, generator=generator)
    bias = torch.tensor([0.5, -0.9, -0.9, -0.9, 0.0, 0.0, 0.0, 0.0])
    by = logits.sigmoid() + bias
    worth = by.reshape(TOKENS, 2, 4).topk(2).values.sum(-1)
    kept = (worth == worth.amax(-1, keepdim=True)).repeat_interleave(4, -1)
    idx = by.masked_fill(~kept, fill).topk(2).indices
    weights = logits.sigmoid().gather(-1, idx)
    both = (idx // 4).amax(-1) != (idx // 4).amin(-1)
    return Routing(logits, idx, weights / weights.sum(-1, keepdim=True), bias=bias), both


def test_an_expert_of_another_group_is_the_models_own_choice() -> None:
    raw, both = routed(0.0)
    assert 0 < int(both.sum()) < TOKENS
    reconcile(raw, SPEC)
    ranked = ranking_scores(raw, SPEC, scores_of(raw.logits, SPEC))
    assert ranked is not None
    used = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, raw.idx, True)
    lowest, highest = (
        ranked.masked_fill(~used, torch.inf).amin(-1),
        ranked.masked_fill(used, -torch.inf).amax(-1),
    )
    assert (lowest >= highest).all()
    assert (lowest[both] == 0).all()


def test_one_group_alone_is_as_before() -> None:
    raw, both = routed(-torch.inf)
    assert not both.any()
    reconcile(raw, SPEC)


def test_an_expert_of_another_group_over_a_positive_score_is_none() -> None:
    raw, _both = routed(-torch.inf)
    inside = (raw.idx // 4 == 1).all(-1)  # the second group has positive scores alone
    idx = raw.idx.clone()
    idx[inside, 1] = 0
    assert inside.any()
    wrong = Routing(raw.logits, idx, None, bias=raw.bias)
    with pytest.raises(
        ReconcileError, match=f"{int(inside.sum())} of 64 tokens were sent to experts that are not"
    ):
        reconcile(wrong, SPEC)
