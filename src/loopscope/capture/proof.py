"""The proof of what was captured: the model's own choice, recomputed from the captured scores.

A difference that is not an exact tie raises, so that a wrong tensor, a wrong tuple order or a mix-up of before
and after softmax never becomes a plausible number.
"""

import torch
from torch import Tensor

from loopscope.capture.errors import ReconcileError
from loopscope.capture.routing import RoutingSpec
from loopscope.capture.scores import (
    HALF,
    Routing,
    candidates,
    choice_scores,
    expected_weights,
    scores_of,
)

__all__ = [
    "Routing",
    "check_shapes",
    "choice_scores",
    "expected_weights",
    "raise_if_wrong",
    "reconcile",
    "scores_of",
    "wrong_counts",
]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    finite = raw.logits.isfinite().all(dim=-1)
    nothing = torch.zeros_like(ok)
    weighs = nothing
    differs = nothing.sum() if spec.forced_balance else _other_choices(raw, spec, scores, used, finite & ok)
    if raw.weights is not None:
        expected = expected_weights(Routing(raw.logits, safe, None, raw.bias, raw.probs), spec, scores)
        tolerance = 2e-2 if raw.weights.dtype in HALF or raw.logits.dtype != torch.float32 else 1e-4
        weighs = finite & ok & _differ(raw.weights, expected, tolerance * max(1.0, abs(spec.route_scale)))
    if raw.probs is not None:
        tolerance = 1e-2 if raw.probs.dtype in HALF else 1e-4
        weighs = weighs | (finite & _differ(raw.probs, scores_of(raw.logits, spec), tolerance))
    return torch.stack([(~ok).sum(), differs, weighs.sum(), _probability_rows(raw.logits, finite)])


def _other_choices(raw: Routing, spec: RoutingSpec, scores: Tensor, used: Tensor, judged: Tensor) -> Tensor:
    """Tokens whose choice is not the top-k of their scores, in the precision that explains the choices best.

    Exact ties may go either way. Scores nearer to each other than their arithmetic's own error may as well, in at
    most one token of a hundred: two kernels round differently in few places, another bias or another order in many.
    """
    counts = []
    for by, error in candidates(raw, spec, scores):
        known = judged & by.isfinite().all(dim=-1)
        exact = (known & _contradicts(by, used, spec, 0.0)).sum()
        if error:
            beyond = (known & _contradicts(by, used, spec, error)).sum()
            exact = torch.where(exact <= 1 + used.shape[0] // 100, beyond, exact)
        counts.append(exact)
    return torch.stack(counts).amin()


def _contradicts(by: Tensor, used: Tensor, spec: RoutingSpec, error: float) -> Tensor:
    """[N] bool: another expert's score is higher than that of one in use, by more than the error of both."""
    others, wrong_group = ~used, None
    if spec.grouped:
        kept, wrong_group = _groups(by, used, spec, error)
        others = others & kept
    lowest = by.masked_fill(~used, float("inf")).amin(dim=-1)
    highest = by.masked_fill(~others, float("-inf")).amax(dim=-1)
    if error:
        highest = highest - error * torch.maximum(lowest.abs(), highest.nan_to_num(neginf=0.0).abs())
    wrong = ~(lowest >= highest)
    return wrong if wrong_group is None else wrong | wrong_group


def _groups(by: Tensor, used: Tensor, spec: RoutingSpec, error: float) -> tuple[Tensor, Tensor]:
    """[N, E] bool, experts of groups that were surely kept or are in use; [N] bool, tokens that use another group."""
    assert spec.num_groups is not None
    assert spec.groups_per_token is not None
    members = by.reshape(*by.shape[:-1], spec.num_groups, -1)
    worth = members.topk(min(2, members.shape[-1]), dim=-1).values.sum(dim=-1)
    ordered = worth.topk(spec.groups_per_token + 1, dim=-1).values
    last_in, first_out = ordered[..., -2:-1], ordered[..., -1:]
    slack = error * worth.abs().amax(dim=-1, keepdim=True)
    in_use = used.reshape(members.shape).any(dim=-1)
    kept = in_use | (worth > first_out + slack)
    wrong = (in_use & (worth < last_in - slack)).any(dim=-1) | (kept.sum(dim=-1) > spec.groups_per_token)
    return kept.unsqueeze(-1).expand(members.shape).flatten(-2), wrong


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
