from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscope.capture import PlanError, ReconcileError, RoutingSpec, reconcile
from loopscope.capture.errors import CoverageError
from loopscope.capture.plan_adapter import check_coverage
from loopscope.capture.proof import Routing

SPEC = RoutingSpec(
    num_experts=8, top_k=2, score_func="softmax", order="score_then_topk", normalised=True, balancing="none"
)
SIGMOID = replace(SPEC, score_func="sigmoid", balancing="probability_bias", route_scale=2.5, normalised=False)
AFTER = replace(SPEC, order="topk_then_score")
GROUPED = replace(SIGMOID, num_groups=4, groups_per_token=2)


def route(spec: RoutingSpec, tokens: int = 32, seed: int = 0, dtype: torch.dtype = torch.float32) -> Routing:
    """A router written down once more, in the plainest way: one token at a time, in Python."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(tokens, spec.num_experts, generator=generator)).to(dtype)
    bias = (
        torch.randn(spec.num_experts, generator=generator) * 0.3
        if spec.balancing == "probability_bias"
        else None
    )
    idx, weights = [], []
    for row in logits:
        scores = row.float().sigmoid() if spec.score_func == "sigmoid" else row.float().softmax(-1)
        by = row.float() if spec.order == "topk_then_score" else scores
        by = by if bias is None else by + bias
        allowed = set(range(spec.num_experts))
        if spec.num_groups is not None:
            size = spec.num_experts // spec.num_groups
            best = sorted(
                range(spec.num_groups),
                key=lambda g: -sum(sorted(by[g * size : (g + 1) * size].tolist())[-2:]),
            )
            allowed = {g * size + i for g in best[: spec.groups_per_token] for i in range(size)}
        chosen = sorted(allowed, key=lambda e: -float(by[e]))[: spec.top_k]
        weigh = row.float()[chosen].softmax(-1) if spec.order == "topk_then_score" else scores[chosen]
        weigh = weigh / weigh.sum() if spec.normalised else weigh
        idx.append(chosen)
        weights.append(weigh * spec.route_scale)
    return Routing(logits, torch.tensor(idx), torch.stack(weights).to(dtype), bias)


@pytest.mark.parametrize(
    "spec", [SPEC, SIGMOID, AFTER, GROUPED], ids=["softmax", "sigmoid", "after", "grouped"]
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_router_reconciles_with_itself(spec: RoutingSpec, seed: int) -> None:
    reconcile(route(spec, tokens=8, seed=seed), spec)


def test_bfloat16_reconciles_and_exact_ties_may_go_either_way() -> None:
    reconcile(route(SPEC, dtype=torch.bfloat16), SPEC)
    logits = torch.tensor([[1.0, 1.0, 1.0, 0, 0, 0, 0, 0]])
    half = torch.tensor([[0.5, 0.5]])
    for chosen in ([0, 1], [2, 0], [1, 2]):
        reconcile(Routing(logits, torch.tensor([chosen]), half), SPEC)
    with pytest.raises(ReconcileError, match="not the top 2"):
        reconcile(Routing(logits, torch.tensor([[0, 3]]), half), SPEC)


# ruff: noqa: E501
def wrong() -> dict[str, tuple[Routing, RoutingSpec, str]]:
    good, sig = route(SPEC), route(SIGMOID)
    probs = good.logits.softmax(-1)
    other = good.idx.clone()
    other[5, 0] = (set(range(8)) - set(good.idx[5].tolist())).pop()
    return {
        "swapped tuple order: weights and indices": (replace_(good, idx=good.weights, weights=good.idx), SPEC, "swapped"),
        "swapped tuple order: logits and weights": (replace_(good, logits=good.weights, weights=good.logits), SPEC, "E"),
        "probabilities captured as logits": (replace_(good, logits=probs), SPEC, "are probabilities"),
        "probabilities as logits at k = 1": (
            replace_(good, logits=probs, idx=probs.topk(1).indices, weights=torch.ones(32, 1)),
            replace(SPEC, top_k=1),
            "are probabilities",
        ),
        "arg-max instead of top-k": (replace_(good, idx=good.idx[:, :1], weights=None), SPEC, "arg-max"),
        "an expert dimension from the largest index": (replace_(good, logits=good.logits[:, :7]), SPEC, "largest index"),
        "one token's choice is another": (replace_(good, idx=other, weights=None), SPEC, "1 of 32 tokens"),
        "an expert chosen twice": (replace_(good, idx=good.idx[:, [0, 0]], weights=None), SPEC, "distinct"),
        "index out of range": (replace_(good, idx=good.idx + 7, weights=None), SPEC, "distinct experts of 8"),
        "softmax before and after": (good, replace(SPEC, normalised=False), "weights"),
        "bias forgotten": (replace_(sig, bias=None), SIGMOID, "top 2"),
        "wrong scale": (sig, replace(SIGMOID, route_scale=1.0), "route_scale"),
        "sigmoid taken for softmax": (
            replace_(sig, bias=None), replace(SIGMOID, score_func="softmax", route_scale=1.0), "weights"
        ),
        "negated logits": (replace_(good, logits=-good.logits), SPEC, "top 2"),
    }  # fmt: skip


def replace_(raw: Routing, **changes: object) -> Routing:
    return replace(raw, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", wrong())
def test_a_wrong_capture_is_refused(name: str) -> None:
    raw, spec, message = wrong()[name]
    with pytest.raises(ReconcileError, match=message):
        reconcile(raw, spec)


def test_one_dense_layer_counted_as_moe_is_refused() -> None:
    check_coverage((1, 2), (1, 2), "M")
    with pytest.raises(CoverageError, match=r"not declared \[0\]"):
        check_coverage((0, 1, 2), (1, 2), "M")
    with pytest.raises(CoverageError, match=r"missing \[2\]"):
        check_coverage((1,), (1, 2), "M")
    with pytest.raises(CoverageError, match="no router was found"):
        check_coverage((), (1, 2), "M")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"balancing": None}, "Say 'unknown'"),
        ({"score_func": "relu"}, "expected one of 'softmax'"),
        ({"top_k": 9}, "1 <= top_k <= num_experts"),
        ({"num_groups": 2}, "together or not at all"),
        ({"normalised": "yes"}, "expected True or False"),
        ({"sources": {"top_n": "config"}}, "no fields"),
    ],
)
def test_a_routing_specification_is_explicit(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(SPEC, **changes)  # type: ignore[arg-type]


def test_unknown_balancing_is_an_answer() -> None:
    assert replace(SPEC, balancing="unknown").balancing == "unknown"
