"""Which descriptions of routing explain what copies of a router did; those that explain all of it are left."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from loopscope.capture import proof
from loopscope.capture.assignment import routing_of_call
from loopscope.capture.errors import PlanError, ReconcileError
from loopscope.capture.fit.trial import Key, Trial
from loopscope.capture.routing import GroupScore, Order, RoutingSpec, ScoreFunc


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tensors of a routing may be found in a trial, best place first."""

    logits: tuple[Key, ...]
    idx: Key
    weights: Key | None
    biases: tuple[Key, ...]
    num_experts: int
    """Experts that compute; scores may know more."""
    top_k: int
    """Experts of a token."""
    assignment: str = "topk_idx"
    """What `idx` is, of the plan's words: indices, or "combine", which is 0 where a token does not run."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A description that explains every trial."""

    spec: RoutingSpec
    tensors: dict[str, Key]
    """Tensor name of the plan → place."""

    def __str__(self) -> str:
        said = self.spec
        words = [said.score_func, said.order, "normalised" if said.normalised else "not normalised"]
        words += [] if said.choice == "top_k" else [f"choice {said.choice}"]
        words += [] if said.weights == "from_scores" else [f"weights {said.weights}"]
        words += [f"scale {said.route_scale:g}"] if said.route_scale != 1.0 else []
        words += (
            [f"{said.groups_per_token} of {said.num_groups} groups by {said.group_score}"]
            if said.grouped
            else []
        )
        where = self.tensors.get("expert_bias")
        return ", ".join([*words, *([] if where is None else [f"bias {where[0]}.{where[1]}"])])


@dataclass(frozen=True, slots=True)
class Look:
    """One trial, as far as it may be compared."""

    trial: Trial
    saturated: bool
    """Scores are so far apart that float32 rounds them to 0 and 1: what the choice ran on shows, weights do not."""


def fits(seen: Sequence[Look], places: Places, groups: Sequence[tuple[int, int]]) -> list[Fit]:
    """Every description that explains all of `seen`, from the first place of the logits that has one.

    Args:
        seen: trials of one router, with other weights each.
        places: where to look.
        groups: (groups, groups a token may choose from) that the router's own numbers allow.
    """
    if not seen:
        return []
    for logits in places.logits:
        for stage in _stages(places, logits, groups):
            found = [fit for fit in _candidates(seen, places, logits, stage) if _explains_all(fit, seen)]
            if found:
                return _told_apart(found, seen)
    return []


@dataclass(frozen=True, slots=True)
class _Stage:
    """Descriptions of one degree of strangeness: what all of them share, and what they may have."""

    shared: dict[str, Any]
    groups: Sequence[tuple[int, int] | None] = (None,)
    probs: Sequence[Key | None] = (None,)


def _stages(places: Places, logits: Key, groups: Sequence[tuple[int, int]]) -> Iterator[_Stage]:
    yield _Stage({})
    yield from (_Stage({"group_score": score}, groups=groups) for score in get_args(GroupScore))
    yield _Stage({"choice": "given"})
    if places.weights is not None:
        yield _Stage({"weights": "proportional"})
        # Weights that follow from nothing tell no score function; scores that are handed over do.
        yield _Stage({"weights": "own"}, probs=[key for key in places.logits if key != logits])


def _candidates(seen: Sequence[Look], places: Places, logits: Key, stage: _Stage) -> Iterator[Fit]:
    first = next(each.trial for each in seen if not each.saturated)
    width, top_k = first.read(logits).shape[-1], places.top_k
    num_experts = min(width, places.num_experts)
    if top_k > num_experts:
        return
    grouped = [group for group in stage.groups if group is None or _divides(group, width, top_k)]
    for bias, group, probs in product((None, *places.biases), grouped, stage.probs):
        for score, order, normalised in product(get_args(ScoreFunc), get_args(Order), (True, False)):
            # A softmax over the chosen is normalised; where weights do not follow, nothing says whether they are.
            known = order == "topk_then_score" and score == "softmax"
            if normalised != known and (known or "weights" in stage.shared):
                continue
            spec = RoutingSpec(
                num_experts=num_experts,
                null_experts=width - num_experts,
                top_k=top_k,
                score_func=score,
                order=order,
                normalised=normalised,
                balancing="unknown",
                num_groups=None if group is None else group[0],
                groups_per_token=None if group is None else group[1],
                **stage.shared,
            )
            tensors = {"router_logits": logits, places.assignment: places.idx}
            places_of = {"topk_weights": places.weights, "expert_bias": bias, "router_probs": probs}
            tensors |= {name: key for name, key in places_of.items() if key is not None}
            fit = Fit(spec, tensors)
            if (scale := _scale(fit, first)) is not None:
                yield replace(fit, spec=replace(spec, route_scale=scale))


def _divides(group: tuple[int, int], num_experts: int, top_k: int) -> bool:
    many, few = group
    each = num_experts // many
    return num_experts % many == 0 and each >= 2 and few * each >= top_k


def _scale(fit: Fit, trial: Trial) -> float | None:
    """The one factor between the weights and what the description makes of the scores; None where there is none."""
    try:
        raw = _routing(fit, trial, weights=True)
        if raw.weights is None or fit.spec.weights != "from_scores":
            return 1.0
        proof.check_shapes(raw, fit.spec, "router")
        expected = proof.expected_weights(raw, fit.spec, proof.scores_of(raw.logits, fit.spec))
    except (ReconcileError, PlanError, RuntimeError):
        return None
    ratio = (raw.weights.double() / expected.double()).flatten()
    middle = float(ratio.median())
    if not 1e-6 < middle < 1e6 or float((ratio / middle - 1).abs().max()) > 1e-3:
        return None
    return float(f"{middle:.5g}")


def _explains_all(fit: Fit, seen: Sequence[Look]) -> bool:
    return all(_explains(fit, each) for each in seen if not each.saturated)


def _explains(fit: Fit, seen: Look) -> bool:
    try:
        raw = _routing(fit, seen.trial, weights=not seen.saturated)
        proof.check_shapes(raw, fit.spec, "router")
    except ReconcileError:
        return False
    wrong = proof.wrong_counts(raw, fit.spec).tolist()
    return not any(wrong)


def _routing(fit: Fit, trial: Trial, *, weights: bool) -> proof.Routing:
    """Raises ReconcileError where the tensors do not fit together."""
    router = {name: trial.read(key) for name, key in fit.tensors.items()}
    logits = router["router_logits"]
    tokens = logits.shape[:-1].numel()
    raw = routing_of_call(router, fit.spec, (1, tokens), "router")
    return raw if weights else replace(raw, weights=None)


def _told_apart(found: list[Fit], seen: Sequence[Look]) -> list[Fit]:
    """One fit of each set that no random weights can tell apart: they make the same choice and the same weights.

    A softmax over the chosen is the softmax over all, normalised. Which of the two ran shows where float32 rounds
    scores to 0: a choice by logits keeps their order, and is taken for one where it does; with k = 1 nothing shows.
    """
    kept: dict[Any, Fit] = {}
    for fit in found:
        key = (
            fit.spec.score_func,
            fit.spec.num_groups,
            fit.spec.groups_per_token,
            fit.tensors.get("expert_bias"),
        )
        before = kept.get(key)
        if before is None or (before.spec.order != fit.spec.order and _chose_by_logits(fit, seen)):
            kept[key] = fit
    return list(kept.values())


def _chose_by_logits(fit: Fit, seen: Sequence[Look]) -> bool:
    """True where the choice kept the order of logits whose scores are equal: only a top-k of logits does."""
    if fit.spec.order != "topk_then_score" or fit.spec.top_k == 1:
        return False
    telling = [each for each in seen if each.saturated and _has_ties(fit, each.trial)]
    return bool(telling) and all(_explains(fit, each) for each in telling)


def _has_ties(fit: Fit, trial: Trial) -> bool:
    """True where the scores of the last expert in and the first one out are equal for half of the tokens."""
    scores = proof.scores_of(_routing(fit, trial, weights=False).logits, fit.spec)
    best = scores.topk(min(fit.spec.top_k + 1, scores.shape[-1]), dim=-1).values
    return bool((best[:, -1] == best[:, -2]).float().mean() > 0.5)


def same_values(one: Tensor, other: Tensor) -> bool:
    """True where two tensors hold the same numbers, whatever their shapes."""
    return one.numel() == other.numel() and torch.equal(one.reshape(-1), other.reshape(-1))
