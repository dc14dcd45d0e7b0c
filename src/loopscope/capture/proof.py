"""The proof of what was captured: the model's own choice, recomputed from the captured scores.

A difference that is not an exact tie raises, so that a wrong tensor, a wrong tuple order or a mix-up of before
and after softmax never becomes a plausible number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loopscope.capture.errors import ReconcileError
from loopscope.capture.routing import RoutingSpec

_HALF = (torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    """[N, E]: what the model's top-k ran on, bias and limit on groups included."""
    chosen_by = raw.logits if spec.order == "topk_then_score" else raw.probs
    if chosen_by is None:
        chosen_by = scores_of(raw.logits, spec) if scores is None else scores
    if raw.bias is not None:
        chosen_by = chosen_by + raw.bias
    if spec.grouped:
        assert spec.num_groups is not None
        assert spec.groups_per_token is not None
        grouped = chosen_by.reshape(*chosen_by.shape[:-1], spec.num_groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1)
        keep = torch.zeros_like(best, dtype=torch.bool)
        keep.scatter_(-1, best.topk(spec.groups_per_token, dim=-1, sorted=False).indices, True)
        chosen_by = grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(-2)
    return chosen_by


def expected_weights(raw: Routing, spec: RoutingSpec, scores: Tensor) -> Tensor:
    """[N, k]: the combine weights that `spec` makes of the captured scores for the experts used."""
    idx = raw.idx.long()
    if spec.order == "topk_then_score":
        return scores_of(raw.logits.gather(-1, idx), spec) * spec.route_scale
    chosen = scores.gather(-1, idx)
    if spec.normalised:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return chosen * spec.route_scale


def check_shapes(raw: Routing, spec: RoutingSpec, where: str) -> None:
    """What can be checked without reading a value: ranks, E, k, types.

    Raises:
        ReconcileError: names the tensor, what was got and what was expected.
    """
    if raw.logits.ndim != 2 or raw.logits.shape[-1] != spec.num_experts:
        raise ReconcileError(
            f"{where}: router_logits is {tuple(raw.logits.shape)}, expected [tokens, {spec.num_experts}]: the model "
            f"declares {spec.num_experts} experts ({_read(spec, 'num_experts')}). The source names another tensor, "
            "or E was taken from the largest index seen."
        )
    if raw.idx.dtype not in _INTEGERS:
        raise ReconcileError(
            f"{where}: topk_idx is {raw.idx.dtype}, expected integers. The tuple order of the source is swapped."
        )
    tokens = raw.logits.shape[0]
    for name, tensor in (("topk_idx", raw.idx), ("topk_weights", raw.weights)):
        if tensor is not None and tuple(tensor.shape) != (tokens, spec.top_k):
            raise ReconcileError(
                f"{where}: {name} is {tuple(tensor.shape)}, expected ({tokens}, {spec.top_k}): the model declares "
                f"k = {spec.top_k} ({_read(spec, 'top_k')}). An arg-max is not a top-k; check the source."
            )
    for name, tensor, shape in (
        ("router_probs", raw.probs, (tokens, spec.num_experts)),
        ("expert_bias", raw.bias, (spec.num_experts,)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ReconcileError(
                f"{where}: {name} is {tuple(tensor.shape)}, expected {shape}. The source names another tensor."
            )
    for name, tensor in (
        ("router_logits", raw.logits),
        ("topk_weights", raw.weights),
        ("router_probs", raw.probs),
    ):
        if tensor is not None and not tensor.is_floating_point():
            raise ReconcileError(
                f"{where}: {name} is {tensor.dtype}, expected floats. The tuple order is swapped."
            )


def wrong_counts(raw: Routing, spec: RoutingSpec) -> Tensor:
    """[4] int64 on the device: tokens whose indices are no k distinct experts, whose choice is not the top-k of the
    scores, whose weights do not follow from the scores, and whose logits are probabilities. No sync.

    Call `check_shapes` first.
    """
    idx = raw.idx.long()
    ok = ((idx >= 0) & (idx < spec.num_experts)).all(dim=-1)
    safe = idx.clamp(0, spec.num_experts - 1)
    used = torch.zeros_like(raw.logits, dtype=torch.bool).scatter_(-1, safe, True)
    ok &= used.sum(dim=-1) == spec.top_k
    unscored = spec.order == "topk_then_score" and (raw.weights is None or spec.forced_balance)
    scores = raw.logits if unscored else scores_of(raw.logits, spec)
    by = choice_scores(raw, spec, scores)
    lowest_used = by.masked_fill(~used, float("inf")).amin(dim=-1)
    highest_other = by.masked_fill(used, float("-inf")).amax(dim=-1)
    finite = raw.logits.isfinite().all(dim=-1)
    weighs = torch.zeros_like(ok)
    # An exact tie may go either way; anything else is another choice than the model's.
    differs = weighs if spec.forced_balance else finite & ok & ~(lowest_used >= highest_other)
    if raw.weights is not None:
        expected = expected_weights(Routing(raw.logits, safe, None, raw.bias, raw.probs), spec, scores)
        tolerance = 2e-2 if raw.weights.dtype in _HALF or raw.logits.dtype != torch.float32 else 1e-4
        weighs = finite & ok & _differ(raw.weights, expected, tolerance * max(1.0, abs(spec.route_scale)))
    if raw.probs is not None:
        tolerance = 1e-2 if raw.probs.dtype in _HALF else 1e-4
        weighs = weighs | (finite & _differ(raw.probs, scores_of(raw.logits, spec), tolerance))
    return torch.stack([(~ok).sum(), differs.sum(), weighs.sum(), _probability_rows(raw.logits, finite)])


def _differ(found: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    # "Not within" rather than "beyond": a NaN differs.
    return ~((found.float() - expected.float()).abs().amax(dim=-1) <= tolerance)


def _probability_rows(logits: Tensor, finite: Tensor) -> Tensor:
    # The same rule as the metrics': E >= 2 and every row lies in [0, 1] and sums to 1. All rows, or none count.
    if logits.shape[-1] < 2:
        return torch.zeros((), dtype=torch.int64, device=logits.device)
    wide = logits.float()
    tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 1e-2
    row = (wide >= 0).all(dim=-1) & (wide <= 1).all(dim=-1) & ((wide.sum(dim=-1) - 1).abs() <= tolerance)
    return row.sum() * ((row | ~finite).all() & finite.any())


_WHAT = (
    "use indices that are not {k} distinct experts of {E}; topk_idx is another tensor",
    "were sent to experts that are not the top {k} of the captured scores; a wrong tensor, tuple order, bias or order "
    "of softmax and top-k",
    "have combine weights or scores that do not follow from the captured logits; before and after softmax are mixed "
    "up, or `normalised`, `route_scale` or `order` is wrong",
    "have router_logits that are probabilities (each row lies in [0, 1] and sums to 1); capture the gate's raw output",
)


def raise_if_wrong(counts: list[int], num_tokens: int, spec: RoutingSpec, where: str) -> None:
    """Raise ReconcileError where one of `wrong_counts` is not zero."""
    if found := [
        f"{count} of {num_tokens} tokens {what.format(k=spec.top_k, E=spec.num_experts)}"
        for count, what in zip(counts, _WHAT, strict=True)
        if count
    ]:
        raise ReconcileError(
            f"{where}: {'; '.join(found)}. Expected the capture to reproduce the model's own choice."
        )


def reconcile(raw: Routing, spec: RoutingSpec, where: str = "router") -> None:
    """Check one call's routing token by token; reads four numbers from the device.

    Raises:
        ReconcileError: what was captured is not what the model used.
    """
    check_shapes(raw, spec, where)
    raise_if_wrong(wrong_counts(raw, spec).tolist(), raw.logits.shape[0], spec, where)


def _read(spec: RoutingSpec, name: str) -> str:
    return spec.sources.get(name, "as the plan says")
