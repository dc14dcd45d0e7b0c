"""The arithmetic of a router, written down once more: from logits to scores, to the choice, to combine weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from loopscope.capture.routing import RoutingSpec

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Router tensors of one call, flattened to N tokens; W = E and the experts that compute nothing."""

    logits: Tensor
    """[N, W], before softmax or sigmoid, in the dtype the gate gave."""
    idx: Tensor
    """[N, k], the experts used; below 0 or W for none, where a token may have fewer than k."""
    weights: Tensor | None = None
    """[N, k], the combine weights as the model used them (raw, scaled); None: not handed over."""
    bias: Tensor | None = None
    """[W], added to the scores (or logits) for the choice."""
    probs: Tensor | None = None
    """[N, W], scores as the model handed them over; None: not handed over."""
    ran: Tensor | None = None
    """[N, k] bool, choices that ran; None: all of them."""
    extra: Tensor | None = None
    """[N] bool, tokens that ran with an expert that is not among `idx`; None: none did."""
    expert_rows: Tensor | None = None
    """[E], tokens that each expert was called with; None: nobody counted."""
    sequence: int = 0
    """S, tokens of a sequence; 0: they are not told apart."""

    def chosen(self, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
        """[N, k] indices that are safe to gather with; [N, k] bool, those that stand for an expert."""
        idx = self.idx.long()
        return idx.clamp(0, spec.width - 1), (idx >= 0) & (idx < spec.width)

    def in_use(self, spec: RoutingSpec) -> Tensor:
        """[N, k] bool: choices that stand for an expert and ran."""
        _, real = self.chosen(spec)
        return real if self.ran is None else real & self.ran


def scores_of(logits: Tensor, spec: RoutingSpec) -> Tensor:
    """[N, W] in float32 or wider: softmax over all experts, or a function of each logit."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if spec.score_func == "sigmoid":
        return wide.sigmoid()
    return wide.softmax(dim=-1) if spec.score_func == "softmax" else softplus(wide).sqrt()


def choice_scores(raw: Routing, spec: RoutingSpec, scores: Tensor | None = None) -> Tensor:
    """[N, W]: what the model's top-k ran on, bias included; experts of groups that are left out as well."""
    if spec.order == "topk_then_score":
        return raw.logits if raw.bias is None else raw.logits + raw.bias
    if raw.bias is not None and spec.logit_bias:
        return scores_of(raw.logits + raw.bias, spec)
    by = raw.probs
    if by is None:
        by = scores_of(raw.logits, spec) if scores is None else scores
    return by if raw.bias is None else by + raw.bias


def ranking_scores(raw: Routing, spec: RoutingSpec, scores: Tensor) -> Tensor | None:
    """[N, W]: the scores behind margins, experts of excluded groups at the lowest one; None: the logits rank alike."""
    if raw.bias is None and not spec.grouped:
        return None
    by = (
        raw.logits + raw.bias
        if raw.bias is not None and spec.logit_bias
        else choice_scores(raw, spec, scores)
    )
    if not spec.grouped:
        return by
    idx, real = raw.chosen(spec)
    used = torch.zeros_like(raw.logits, dtype=torch.int64).scatter_add_(-1, idx, real.long()) > 0
    chosen_by = choice_scores(raw, spec, scores)
    kept, elsewhere = kept_groups(chosen_by, used, spec, 0.0)
    lowest = by.masked_fill(~kept, float("inf")).amin(dim=-1, keepdim=True)
    ranked = torch.where(kept, by, lowest)
    return torch.where(elsewhere.unsqueeze(-1), zero_filled(chosen_by, spec), ranked)


def candidates(raw: Routing, spec: RoutingSpec, scores: Tensor) -> Iterator[tuple[Tensor, float]]:
    """The choice scores in every precision in which the forward may have computed them.

    A router under autocast, or in a model of a half type, computes its scores in that type and breaks ties that
    float32 does not know.

    Yields:
        (choice scores [N, W], relative error of their arithmetic), float32 (or what was handed over) first.
    """
    handed_over = spec.order == "topk_then_score" or (raw.probs is not None and not spec.logit_bias)
    by = choice_scores(raw, spec, scores)
    yield by, 0.0 if handed_over else 4 * torch.finfo(by.dtype).eps
    if not handed_over and by.dtype == torch.float64:
        single = replace(raw, logits=raw.logits.float(), bias=None if raw.bias is None else raw.bias.float())
        yield choice_scores(single, spec, scores.float()), 4 * torch.finfo(torch.float32).eps
    given = (raw.logits, raw.weights, raw.probs)
    for half in dict.fromkeys(
        tensor.dtype for tensor in given if tensor is not None and tensor.dtype in HALF
    ):
        rounded = replace(
            raw, logits=raw.logits.to(half), probs=None if raw.probs is None else raw.probs.to(half)
        )
        error = torch.finfo(half).eps
        yield choice_scores(rounded, spec, scores.to(half)).to(_sum_type(half, raw.bias)), error
        if raw.bias is not None and raw.bias.dtype != half:
            narrow = replace(rounded, bias=raw.bias.to(half))
            yield choice_scores(narrow, spec, scores.to(half)).to(half), error


def _sum_type(half: torch.dtype, bias: Tensor | None) -> torch.dtype:
    return half if bias is None else torch.promote_types(half, bias.dtype)


def kept_groups(by: Tensor, used: Tensor, spec: RoutingSpec, error: float) -> tuple[Tensor, Tensor]:
    """[N, W] bool, experts of groups that were surely kept or are in use; [N] bool, tokens that use another group.

    Args:
        by: [N, W], choice scores.
        used: [N, W] bool, experts in use.
        spec: with a limit on groups.
        error: relative error of the scores; groups that differ by less may go either way.
    """
    assert spec.num_groups is not None
    assert spec.groups_per_token is not None
    members = by.reshape(*by.shape[:-1], spec.num_groups, -1)
    worth = _worth_of_groups(by, spec)
    ordered = worth.topk(spec.groups_per_token + 1, dim=-1).values
    last_in, first_out = ordered[..., -2:-1], ordered[..., -1:]
    slack = error * worth.abs().amax(dim=-1, keepdim=True)
    in_use = used.reshape(members.shape).any(dim=-1)
    kept = in_use | (worth > first_out + slack)
    wrong = (in_use & (worth < last_in - slack)).any(dim=-1) | (kept.sum(dim=-1) > spec.groups_per_token)
    return kept.unsqueeze(-1).expand(members.shape).flatten(-2), wrong


def zero_filled(by: Tensor, spec: RoutingSpec) -> Tensor:
    """[N, W]: choice scores that are 0, not lowest, in groups that were not kept: where a score of a kept group is
    negative, such a model chooses from the other groups."""
    assert spec.num_groups is not None
    assert spec.groups_per_token is not None
    worth = _worth_of_groups(by, spec)
    best = torch.zeros_like(worth, dtype=torch.bool)
    best.scatter_(-1, worth.topk(spec.groups_per_token, dim=-1).indices, True)
    return by.masked_fill(~best.repeat_interleave(by.shape[-1] // spec.num_groups, dim=-1), 0.0)


def _worth_of_groups(by: Tensor, spec: RoutingSpec) -> Tensor:
    members = by.reshape(*by.shape[:-1], spec.num_groups or 1, -1)
    best = {"top2_sum": min(2, members.shape[-1]), "maximum": 1, "sum": members.shape[-1]}[spec.group_score]
    return members.topk(best, dim=-1).values.sum(dim=-1)


def expected_weights(
    raw: Routing, spec: RoutingSpec, scores: Tensor, counted: Tensor | None = None
) -> Tensor:
    """[N, k]: the combine weights that `spec` makes of the captured scores for the experts chosen; 0 for none.

    Args:
        raw: the call's tensors.
        spec: how the router weighs.
        scores: `scores_of(raw.logits, spec)`.
        counted: [N, k] bool, the choices that share a token's weight; None: all.
    """
    idx, real = raw.chosen(spec)
    counted = real if counted is None else counted
    logits = raw.logits
    if raw.bias is not None and spec.bias_in_weights:
        logits = logits + raw.bias if spec.logit_bias else logits
        scores = scores_of(logits, spec) if spec.logit_bias else scores + raw.bias
    if spec.order == "topk_then_score" and spec.score_func == "softmax":
        wide = logits if logits.dtype == torch.float64 else logits.float()
        chosen = wide.gather(-1, idx).masked_fill(~counted, float("-inf")).softmax(dim=-1)
        return torch.where(real & counted.any(dim=-1, keepdim=True), chosen, 0.0) * spec.route_scale
    chosen = scores_of(logits, spec) if spec.order == "topk_then_score" else scores
    chosen = torch.where(real, chosen.gather(-1, idx), 0.0)
    if spec.normalised:
        total = torch.where(counted, chosen, 0.0).sum(dim=-1, keepdim=True)
        chosen = chosen / total.clamp_min(1e-20)
    return chosen * spec.route_scale


def asked_for(raw: Routing, spec: RoutingSpec, scores: Tensor) -> Tensor:
    """[N]: Σ of the scores of the k experts that a token asked for, where only those that ran are known."""
    best = choice_scores(raw, spec, scores).topk(spec.top_k, dim=-1).indices
    return scores.gather(-1, best).sum(dim=-1)
