"""From what one call's boundaries handed over to a TracePoint: shapes, scores, weights, and the check of the choice."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from loopscope.capture import proof
from loopscope.capture.assignment import routing_of_call
from loopscope.capture.errors import ReconcileError
from loopscope.capture.routing import RoutingSpec
from loopscope.capture.scores import ranking_scores
from loopscope.trace import TracePoint, VisitSpec

Checks = list[tuple[str, RoutingSpec, int, Tensor]]
"""(where, routing, tokens, `proof.wrong_counts`) of each router of a forward, still on the device."""


def point_of(
    block: str,
    residual: Tensor,
    router: Mapping[str, Tensor],
    spec: RoutingSpec | None,
    at: VisitSpec,
    checks: Checks | None,
    expert_rows: list[int] | None = None,
    traits: tuple[str, ...] = (),
) -> TracePoint:
    """One visit as a TracePoint.

    Args:
        block: name of the block's module, for messages.
        residual: [B, S, d], the block's output; [T, d] is taken as one sequence of T tokens.
        router: tensor name → tensor of the router's call; empty for a dense visit.
        spec: how the router chooses; None for a dense visit.
        at: the visit's coordinates.
        checks: gets the counts of what is wrong; None: nothing is checked.
        expert_rows: tokens that each expert was called with, where the plan counts them.
        traits: of the visit's tokens.

    Raises:
        ReconcileError: a shape or a type is not what the plan says.
    """
    flat = residual.ndim == 2
    if flat:
        residual = residual.unsqueeze(0)
    if residual.ndim != 3 or not residual.is_floating_point():
        raise ReconcileError(
            f"{block}: residual is {residual.dtype} {tuple(residual.shape)}, expected floats [B, S, d], or [T, d] "
            "where sequences are packed. Name the block's output that has one vector per token; of several residual "
            "streams [B, S, n, d], decode.streams."
        )
    fields = dict(_DENSE)
    if router and spec is not None:
        where = f"{block} (unrolled_pos {at.unrolled_pos})"
        raw = routing_of_call(router, spec, (residual.shape[0], residual.shape[1]), where)
        proof.check_shapes(raw, spec, where)
        if expert_rows is not None:
            raw = replace(raw, expert_rows=torch.tensor(expert_rows, device=raw.logits.device))
        if checks is not None:
            checks.append((where, spec, raw.logits.shape[0], proof.wrong_counts(raw, spec)))
        fields = router_fields(raw, spec, residual.shape[:2])
    if flat:
        traits = (*traits, "flat")
    if traits:
        fields["traits"] = (*fields.get("traits", ()), *traits)
    return TracePoint(
        block=at.block,
        unrolled_pos=at.unrolled_pos,
        loop_step=at.loop_step,
        layer_idx=at.layer_idx,
        residual=residual,
        **fields,
    )


_DENSE: Mapping[str, Any] = MappingProxyType(
    {"num_experts": 0, "top_k": 0}
    | dict.fromkeys(("router_logits", "router_probs", "topk_idx", "topk_weights"))
)


def router_fields(
    raw: proof.Routing, spec: RoutingSpec, shape: torch.Size | tuple[int, int]
) -> dict[str, Any]:
    """The router fields of a TracePoint from one call's tensors: scores over all E summing to 1, weights
    renormalised, the scores that decided where they are not the logits. [N, ...] becomes [B, S, ...]."""

    def shaped(tensor: Tensor) -> Tensor:
        return tensor.reshape(*shape, tensor.shape[-1])

    # The model's own scores where they were handed over, else from the logits.
    scores = raw.probs if raw.probs is not None else proof.scores_of(raw.logits, spec)
    probs = (
        scores if spec.score_func == "softmax" else scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    )
    weights = raw.weights if raw.weights is not None else proof.expected_weights(raw, spec, scores)
    ranking = ranking_scores(raw, spec, scores)
    idx, dropped = raw.idx, None
    if spec.open_choice:
        here = raw.in_use(spec) & (idx < spec.num_experts)
        dropped = _dropped(raw, spec)
        idx = torch.where(here, idx.long(), -1)
        weights = torch.where(here, weights, 0.0)
    weights = weights.float()
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    experts = slice(0, spec.num_experts)
    return {
        "num_experts": spec.num_experts,
        "top_k": idx.shape[-1],
        "router_logits": shaped(raw.logits[:, experts]),
        "router_probs": shaped(probs[:, experts]),
        "topk_idx": shaped(idx),
        "topk_weights": shaped(weights),
        "score_func": spec.score_func,
        "selection_scores": None if ranking is None else shaped(ranking[:, experts]),
        "expert_bias": None if raw.bias is None else raw.bias[experts],
        "dropped": None if dropped is None else dropped.reshape(*shape),
        "traits": spec.traits,
    }


def _dropped(raw: proof.Routing, spec: RoutingSpec) -> Tensor | None:
    """[N]: choices that did not run; where only those that ran are known, every token asked for k."""
    if spec.dropless or spec.choice == "expert_choice":
        return None
    _, real = raw.chosen(spec)
    asked = real.sum(dim=-1) if raw.ran is not None else spec.top_k
    return asked - raw.in_use(spec).sum(dim=-1)
