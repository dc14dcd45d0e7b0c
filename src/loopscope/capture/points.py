"""From what one call's boundaries handed over to a TracePoint: shapes, scores, weights, and the check of the choice."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from loopscope.capture import proof
from loopscope.capture.errors import ReconcileError
from loopscope.capture.routing import RoutingSpec
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
) -> TracePoint:
    """One visit as a TracePoint.

    Args:
        block: name of the block's module, for messages.
        residual: [B, S, d], the block's output; [T, d] is taken as one sequence of T tokens.
        router: tensor name → tensor of the router's call; empty for a dense visit.
        spec: how the router chooses; None for a dense visit.
        at: the visit's coordinates.
        checks: gets the counts of what is wrong; None: nothing is checked.

    Raises:
        ReconcileError: a shape or a type is not what the plan says.
    """
    if residual.ndim == 2:
        residual = residual.unsqueeze(0)
    if residual.ndim != 3 or not residual.is_floating_point():
        raise ReconcileError(
            f"{block}: residual is {residual.dtype} {tuple(residual.shape)}, expected floats [B, S, d], or [T, d] "
            "where sequences are packed. Name the block's output that has one vector per token."
        )
    fields = _DENSE
    if router and spec is not None:
        where = f"{block} (unrolled_pos {at.unrolled_pos})"
        raw = _flat(router, residual, spec, where)
        if checks is not None:
            checks.append((where, spec, raw.logits.shape[0], proof.wrong_counts(raw, spec)))
        fields = router_fields(raw, spec, residual.shape[:2])
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
    renormalised, selection scores where a bias was added. [N, ...] becomes [B, S, ...]."""
    # The model's own scores where they were handed over, else from the logits.
    scores = raw.probs if raw.probs is not None else proof.scores_of(raw.logits, spec)
    probs = (
        scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20) if spec.score_func == "sigmoid" else scores
    )
    weights = raw.weights if raw.weights is not None else proof.expected_weights(raw, spec, scores)
    weights = weights.float()
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return {
        "num_experts": raw.logits.shape[-1],
        "top_k": raw.idx.shape[-1],
        "router_logits": raw.logits.reshape(*shape, raw.logits.shape[-1]),
        "router_probs": probs.reshape(*shape, probs.shape[-1]),
        "topk_idx": raw.idx.reshape(*shape, raw.idx.shape[-1]),
        "topk_weights": weights.reshape(*shape, weights.shape[-1]),
        "score_func": spec.score_func,
        "selection_scores": None
        if raw.bias is None
        else (scores + raw.bias).reshape(*shape, scores.shape[-1]),
        "expert_bias": raw.bias,
    }


def _flat(router: Mapping[str, Tensor], residual: Tensor, spec: RoutingSpec, where: str) -> proof.Routing:
    def flat(name: str) -> Tensor | None:
        tensor = router.get(name)
        return None if tensor is None else tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])

    logits, idx = flat("router_logits"), flat("topk_idx")
    if logits is None or idx is None:
        raise ReconcileError(f"{where}: router_logits or topk_idx was not handed over in this call.")
    raw = proof.Routing(logits, idx, flat("topk_weights"), router.get("expert_bias"), flat("router_probs"))
    proof.check_shapes(raw, spec, where)
    if logits.shape[0] != (tokens := residual.shape[0] * residual.shape[1]):
        raise ReconcileError(
            f"{where}: the router saw {logits.shape[0]} tokens, the block's output has {tuple(residual.shape[:2])} = "
            f"{tokens}. Sequences must not be sharded or packed between the two."
        )
    return raw
