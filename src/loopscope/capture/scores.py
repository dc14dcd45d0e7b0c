"""The arithmetic of a router, written down once more: from logits to scores, to the choice, to combine weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loopscope.capture.routing import RoutingSpec

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Router tensors of one call, flattened to N tokens."""

    logits: Tensor
    """[N, E], before softmax or sigmoid, in the dtype the gate gave."""
    idx: Tensor
    """[N, k], the experts used."""
    weights: Tensor | None = None
    """[N, k], the combine weights as the model used them (raw, scaled); None: not handed over."""
    bias: Tensor | None = None
    """[E], added to the scores for the choice alone."""
    probs: Tensor | None = None
    """[N, E], scores as the model handed them over; None: not handed over."""


def scores_of(logits: Tensor, spec: RoutingSpec) -> Tensor:
    """[N, E] in float32 or wider: softmax over all experts, or the sigmoid of each."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.sigmoid() if spec.score_func == "sigmoid" else wide.softmax(dim=-1)


def choice_scores(raw: Routing, spec: RoutingSpec, scores: Tensor | None = None) -> Tensor:
    """[N, E]: what the model's top-k ran on, bias included; experts of groups that are left out as well."""
    chosen_by = raw.logits if spec.order == "topk_then_score" else raw.probs
    if chosen_by is None:
        chosen_by = scores_of(raw.logits, spec) if scores is None else scores
    return chosen_by if raw.bias is None else chosen_by + raw.bias


def candidates(raw: Routing, spec: RoutingSpec, scores: Tensor) -> Iterator[tuple[Tensor, float]]:
    """The choice scores in every precision in which the forward may have computed them.

    A router under autocast, or in a model of a half type, computes its scores in that type and breaks ties that
    float32 does not know.

    Yields:
        (choice scores [N, E], relative error of their arithmetic), float32 (or what was handed over) first.
    """
    handed_over = spec.order == "topk_then_score" or raw.probs is not None
    by = choice_scores(raw, spec, scores)
    yield by, 0.0 if handed_over else 4 * torch.finfo(by.dtype).eps
    if not handed_over and by.dtype == torch.float64:
        single = scores.float()
        by = single if raw.bias is None else single + raw.bias.float()
        yield by, 4 * torch.finfo(torch.float32).eps
    given = (raw.logits, raw.weights, raw.probs)
    for half in dict.fromkeys(
        tensor.dtype for tensor in given if tensor is not None and tensor.dtype in HALF
    ):
        rounded = replace(
            raw, logits=raw.logits.to(half), probs=None if raw.probs is None else raw.probs.to(half)
        )
        error = torch.finfo(half).eps
        yield choice_scores(rounded, spec, scores.to(half)), error
        if raw.bias is not None and raw.bias.dtype != half:
            yield choice_scores(replace(rounded, bias=raw.bias.to(half)), spec, scores.to(half)), error


def expected_weights(raw: Routing, spec: RoutingSpec, scores: Tensor) -> Tensor:
    """[N, k]: the combine weights that `spec` makes of the captured scores for the experts used."""
    idx = raw.idx.long()
    if spec.order == "topk_then_score":
        return scores_of(raw.logits.gather(-1, idx), spec) * spec.route_scale
    chosen = scores.gather(-1, idx)
    if spec.normalised:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return chosen * spec.route_scale
