"""The proof in the precision of the forward: near-ties of a half type are no mismatch, real mistakes are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopscope.capture import ReconcileError, RoutingSpec, reconcile
from loopscope.capture.proof import Routing

PLAIN = RoutingSpec(
    num_experts=64, top_k=6, score_func="softmax", order="score_then_topk", normalised=True, balancing="none"
)
BIASED = replace(PLAIN, score_func="sigmoid", balancing="probability_bias")
GROUPED = replace(BIASED, num_groups=8, groups_per_token=4)
SPECS = {
    "softmax": PLAIN,
    "sigmoid with bias": BIASED,
    "groups": GROUPED,
    "after": replace(PLAIN, order="topk_then_score"),
}


def half_router(
    spec: RoutingSpec, dtype: torch.dtype, *, rounded_sum: bool, seed: int = 0, tokens: int = 512
) -> Routing:
    """Everything behind the gate in `dtype`, as autocast and half models do it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, spec.num_experts, generator=generator).to(dtype)
    bias = torch.randn(spec.num_experts, generator=generator) * 0.1 if spec.score_func == "sigmoid" else None
    scores = logits.sigmoid() if spec.score_func == "sigmoid" else logits.softmax(-1)
    by = logits if spec.order == "topk_then_score" else scores
    if bias is not None:
        by = by + (bias.to(dtype) if rounded_sum else bias)
    if spec.num_groups is not None:
        grouped = by.reshape(tokens, spec.num_groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(spec.groups_per_token or 0, -1).indices
        kept = torch.zeros(tokens, spec.num_groups, dtype=torch.bool).scatter_(1, best, True)
        by = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    idx = by.topk(spec.top_k, -1, sorted=False).indices
    if spec.order == "topk_then_score":
        weights = logits.gather(1, idx).softmax(-1)
    else:
        weights = scores.gather(1, idx)
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(logits, idx, weights, bias)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounded_sum", [False, True])
def test_a_choice_made_in_a_half_type_reconciles(name: str, dtype: torch.dtype, rounded_sum: bool) -> None:
    for seed in range(5):
        raw = half_router(SPECS[name], dtype, rounded_sum=rounded_sum, seed=seed)
        reconcile(raw, SPECS[name])


def test_a_choice_made_in_a_half_type_from_wide_logits_reconciles() -> None:
    logits = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    weights, idx = logits.softmax(-1).bfloat16().topk(6, -1)
    reconcile(Routing(logits, idx, weights), replace(PLAIN, normalised=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sigmoid with bias", "groups"])
def test_a_small_bias_that_was_forgotten_is_found_in_a_half_type(name: str, dtype: torch.dtype) -> None:
    raw = half_router(SPECS[name], dtype, rounded_sum=False)
    assert raw.bias is not None
    with pytest.raises(ReconcileError, match="not the top 6"):
        reconcile(replace(raw, bias=None, weights=None), SPECS[name])
    with pytest.raises(ReconcileError, match="not the top 6"):
        reconcile(replace(raw, bias=raw.bias.roll(1), weights=None), SPECS[name])
    with pytest.raises(ReconcileError, match="not the top 6"):
        reconcile(replace(raw, bias=raw.bias * 0.9, weights=None), SPECS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_swapped_token_is_found(dtype: torch.dtype) -> None:
    raw = half_router(PLAIN, dtype, rounded_sum=False)
    order = raw.logits.float().argsort(-1, descending=True)
    idx = raw.idx.clone()
    idx[7] = torch.cat([order[7, :5], order[7, 9:10]])  # the tenth best in place of the sixth
    with pytest.raises(ReconcileError, match="1 of 512 tokens"):
        reconcile(replace(raw, idx=idx, weights=None), PLAIN)


def test_scores_an_ulp_apart_may_go_either_way_in_few_tokens_only() -> None:
    logits = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    idx = logits.topk(6, -1).indices
    near = logits.clone()
    near.scatter_(
        1, logits.topk(7, -1).indices[:, 6:], logits.gather(1, idx[:, 5:]).nextafter(torch.tensor(9.0))
    )
    few = torch.where(torch.arange(400)[:, None] < 4, near, logits)
    reconcile(Routing(few, idx), PLAIN)
    with pytest.raises(ReconcileError, match="400 of 400"):
        reconcile(Routing(near, idx), replace(PLAIN, order="topk_then_score"))


def test_a_group_used_beyond_the_limit_is_found() -> None:
    raw = half_router(GROUPED, torch.float32, rounded_sum=False)
    with pytest.raises(ReconcileError, match="not the top 6"):
        reconcile(raw, replace(GROUPED, groups_per_token=3))
