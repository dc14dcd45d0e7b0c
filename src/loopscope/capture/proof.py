"""The proof of what was captured: the model's own choice, recomputed from the captured scores.

A difference that the forward's own rounding does not explain raises, so that a wrong tensor, a wrong tuple order or a
mix-up of before and after softmax never becomes a plausible number.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from loopscope.capture.errors import ReconcileError
from loopscope.capture.routing import RoutingSpec
from loopscope.capture.scores import (
    HALF,
    Routing,
    asked_for,
    candidates,
    choice_scores,
    expected_weights,
    kept_groups,
    scores_of,
    zero_filled,
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
    if raw.logits.ndim != 2 or raw.logits.shape[-1] != spec.width:
        raise ReconcileError(
            f"{where}: router_logits is {tuple(raw.logits.shape)}, expected [tokens, {spec.width}]: the model "
            f"declares {spec.width} experts ({_read(spec, 'num_experts')}). The source names another tensor, "
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
        ("router_probs", raw.probs, (tokens, spec.width)),
        ("expert_bias", raw.bias, (spec.width,)),
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
    """[5] int64 on the device: tokens whose indices are no k distinct experts, whose choice is not the top-k of the
    scores, whose weights do not follow from the scores, whose logits are probabilities; and tokens that experts got
    otherwise than the router chose. No sync.

    Call `check_shapes` first.
    """
    idx, real = raw.chosen(spec)
    times = torch.zeros(raw.logits.shape, dtype=torch.int64, device=idx.device).scatter_add_(
        -1, idx, real.long()
    )
    known = real
    if spec.open_choice:
        known = known | (raw.idx < 0) | (raw.idx == spec.width)
    ok = known.all(dim=-1)
    if spec.choice != "given":  # a table may name an expert twice
        ok = ok & (times <= 1).all(dim=-1)
    if raw.extra is not None:
        ok = ok & ~raw.extra
    in_use = raw.in_use(spec)
    if raw.ran is not None and spec.dropless:
        ok = ok & (in_use == real).all(dim=-1)
    runs = torch.zeros_like(times).scatter_add_(-1, idx, in_use.long())
    used = runs > 0
    unscored = spec.order == "topk_then_score" and (raw.weights is None or spec.forced_balance)
    scores = raw.logits if unscored else scores_of(raw.logits, spec)
    finite = raw.logits.isfinite().all(dim=-1)
    judged = finite & ok
    nobody_ranks = spec.forced_balance or spec.choice in ("soft", "sampled", "given")
    differs = (
        ok.new_zeros((), dtype=torch.int64)
        if nobody_ranks
        else _other_choices(raw, spec, scores, used, judged)
    )
    weighs = torch.zeros_like(ok)
    if raw.weights is not None and spec.weights != "own":
        weighs = judged & _other_weights(raw, spec, scores, in_use)
    if raw.probs is not None:
        tolerance = 1e-2 if raw.probs.dtype in HALF else 1e-4
        weighs = weighs | (finite & _differ(raw.probs, scores_of(raw.logits, spec), tolerance))
    elsewhere = ok.new_zeros((), dtype=torch.int64)
    if raw.expert_rows is not None:
        got = runs.sum(dim=0)[: spec.num_experts]
        elsewhere = (got - raw.expert_rows).abs().sum()
    return torch.stack([(~ok).sum(), differs, weighs.sum(), _probability_rows(raw.logits, finite), elsewhere])


def _other_weights(raw: Routing, spec: RoutingSpec, scores: Tensor, in_use: Tensor) -> Tensor:
    """[N] bool: weights of experts in use that do not follow, whether those or all that were asked for share them."""
    assert raw.weights is not None
    tolerance = 2e-2 if raw.weights.dtype in HALF or raw.logits.dtype != torch.float32 else 1e-4
    tolerance *= max(1.0, abs(spec.route_scale))
    found = torch.where(in_use, raw.weights.float(), 0.0)
    if spec.weights == "proportional":
        found, tolerance = _shares(found), 2e-2 if tolerance > 1e-3 else 1e-4
    wrong = None
    for expected in _ways_to_weigh(raw, spec, scores, in_use):
        expected = torch.where(in_use, expected, 0.0)
        differs = _differ(found, _shares(expected) if spec.weights == "proportional" else expected, tolerance)
        wrong = differs if wrong is None else wrong & differs
    assert wrong is not None
    return wrong


def _ways_to_weigh(raw: Routing, spec: RoutingSpec, scores: Tensor, in_use: Tensor) -> Iterator[Tensor]:
    yield expected_weights(raw, spec, scores)
    if not spec.dropless:
        yield expected_weights(raw, spec, scores, in_use)
        if spec.normalised and spec.order == "score_then_topk":
            shared = expected_weights(raw, spec, scores, in_use)
            idx, _ = raw.chosen(spec)
            ran = torch.where(in_use, scores.gather(-1, idx), 0.0).sum(dim=-1)
            yield shared * (ran / asked_for(raw, spec, scores).clamp_min(1e-20)).unsqueeze(-1)


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)


def _other_choices(raw: Routing, spec: RoutingSpec, scores: Tensor, used: Tensor, judged: Tensor) -> Tensor:
    """Tokens whose choice is not the top-k of their scores, in the precision that explains the choices best.

    Exact ties may go either way. Scores nearer to each other than their arithmetic's own error may as well, in at
    most one token of a hundred: two kernels round differently in few places, another bias or another order in many.
    """
    counts = []
    for by, error in candidates(raw, spec, scores):
        known = judged & by.isfinite().all(dim=-1)
        exact = _count(by, used, known, raw, spec, 0.0)
        if error:
            beyond = _count(by, used, known, raw, spec, error)
            exact = torch.where(exact <= 1 + used.shape[0] // 100, beyond, exact)
        counts.append(exact)
    return torch.stack(counts).amin()


def _count(by: Tensor, used: Tensor, known: Tensor, raw: Routing, spec: RoutingSpec, error: float) -> Tensor:
    if spec.choice != "expert_choice":
        return (known & _contradicts(by, used, spec, error)).sum()
    # Experts choose from the batch, or from each sequence.
    found = [(known & _passed_over(by[None], used[None], error)).sum()]
    if raw.sequence and used.shape[0] > raw.sequence:
        shape = (-1, raw.sequence, by.shape[-1])
        found.append((known & _passed_over(by.reshape(shape), used.reshape(shape), error)).sum())
    return torch.stack(found).amin()


def _passed_over(by: Tensor, used: Tensor, error: float) -> Tensor:
    """[B·S] bool, of [B, S, W]: tokens that an expert left out for one with a lower score."""
    lowest = by.masked_fill(~used, float("inf")).amin(dim=1, keepdim=True)
    limit = lowest + error * lowest.abs() if error else lowest
    return (~used & (by > limit)).any(dim=-1).reshape(-1)


def _contradicts(by: Tensor, used: Tensor, spec: RoutingSpec, error: float) -> Tensor:
    """[N] bool: too many other scores are higher than that of an expert in use, by more than the error of both.

    None may be; where a capacity drops assignments, as many as the token has fewer experts than k.
    """
    others, wrong_group = ~used, None
    if spec.grouped:
        kept, wrong_group = kept_groups(by, used, spec, error)
        others = others & kept
    lowest = by.masked_fill(~used, float("inf")).amin(dim=-1)
    if spec.dropless:
        highest = by.masked_fill(~others, float("-inf")).amax(dim=-1)
        if error:
            highest = highest - error * torch.maximum(lowest.abs(), highest.nan_to_num(neginf=0.0).abs())
        wrong = ~(lowest >= highest)
    else:
        limit = (lowest + error * lowest.abs() if error else lowest).unsqueeze(-1)
        wrong = (others & (by > limit)).sum(dim=-1) + used.sum(dim=-1) > spec.top_k
        wrong &= used.any(dim=-1)
    if wrong_group is None:
        return wrong
    # Some models give the experts of other groups 0 instead of the lowest score, and choose one over a negative score.
    alone = replace(spec, num_groups=None, groups_per_token=None)
    return (wrong | wrong_group) & _contradicts(zero_filled(by, spec), used, alone, error)


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
    "use indices that are not {k} distinct experts of {E}, or not all of them ran; topk_idx is another tensor, or a "
    "capacity drops assignments (dropless: false), or k varies (variable_k: true)",
    "were sent to experts that are not the top {k} of the captured scores; a wrong tensor, tuple order, bias or order "
    "of softmax and top-k",
    "have combine weights or scores that do not follow from the captured logits; before and after softmax are mixed "
    "up, or `normalised`, `route_scale` or `order` is wrong",
    "have router_logits that are probabilities (each row lies in [0, 1] and sums to 1); capture the gate's raw output",
    "were with other experts than the router chose, by the number of tokens that the experts were called with; the "
    "choice is read from another tensor, or a decoder recomputes another one",
)


def raise_if_wrong(counts: list[int], num_tokens: int, spec: RoutingSpec, where: str) -> None:
    """Raise ReconcileError where one of `wrong_counts` is not zero."""
    if found := [
        f"{count} of {num_tokens} tokens {what.format(k=spec.top_k, E=spec.width)}"
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
