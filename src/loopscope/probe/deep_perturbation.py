"""Disturbed forwards beside a clean one → rows of probe_perturbation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from loopscope.metrics.probe.perturbation import (
    EPSILON,
    disturbance,
    flipped_share,
    frobenius,
    geometric_rate,
)
from loopscope.probe.deep_routing import Row, visit_keys
from loopscope.probe.deep_rows import settle
from loopscope.trace import TraceSink


class Injection:
    """Disturbs the loop's input once per forward, in a direction that one generator draws."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._done = False
        self.square = 0.0
        """Σ of the squared length of everything injected so far."""

    @contextmanager
    def into(self, entry: nn.Module) -> Iterator[None]:
        """While the block runs, the first call of `entry` gets a disturbed first argument."""
        self._done = False
        # Before any other hook: FSDP's own would already have cast the input.
        handle = entry.register_forward_pre_hook(self._disturb, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _disturb(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._done:
            return None
        self._done = True
        h_BSD, *others = arguments
        added_BSD = disturbance(h_BSD, self._generator)
        self.square += float(added_BSD.double().square().sum())
        return (h_BSD + added_BSD, *others)


@dataclass(slots=True)
class _Visit:
    keys: Row
    layer_idx: int
    loop_step: int
    square: float = 0.0
    tokens: int = 0
    distance: list[float] = field(default_factory=list)
    """Per direction, Σ of the squared distance."""
    flips: list[float] = field(default_factory=list)
    """Per direction, tokens whose set of experts changed."""


class Perturbations:
    """Distances over the documents so far, per loop visit and direction; numbers only."""

    def __init__(self, num_directions: int, seed: int) -> None:
        self.injections = [
            Injection(torch.Generator().manual_seed(seed + number)) for number in range(num_directions)
        ]
        self.refused: str | None = None
        """Why nothing can be reported; None while all is well."""
        self._visits: dict[int, _Visit] = {}

    def add_clean(self, clean: TraceSink, again: TraceSink, num_loop_steps: int) -> None:
        """Two clean forwards over the next documents: they must be equal bit for bit, in float32."""
        for position, point in clean.items():
            if point.residual.dtype != torch.float32:
                self.refused = f"the forward is in {point.residual.dtype}, not in float32"
            if position not in again or not torch.equal(point.residual, again[position].residual):
                self.refused = self.refused or "two clean forwards differ"
            if point.block != "loop":
                continue
            visit = self._visits.setdefault(
                position,
                _Visit(
                    visit_keys(point, num_loop_steps),
                    point.layer_idx,
                    point.loop_step,
                    distance=[0.0] * len(self.injections),
                    flips=[0.0] * len(self.injections),
                ),
            )
            visit.square += frobenius(point.residual, point.residual)[1] ** 2
            visit.tokens += point.residual.shape[0] * point.residual.shape[1]

    def add(self, direction: int, clean: TraceSink, disturbed: TraceSink) -> None:
        """A forward over the same documents that was disturbed in one direction."""
        for position, visit in self._visits.items():
            one, other = clean[position], disturbed[position]
            visit.distance[direction] += frobenius(one.residual, other.residual)[0] ** 2
            if one.topk_idx is not None and other.topk_idx is not None:
                tokens = one.topk_idx.shape[0] * one.topk_idx.shape[1]
                visit.flips[direction] += flipped_share(one.topk_idx, other.topk_idx) * tokens

    def rows(self) -> list[Row]:
        """A row per loop visit; none where the clean forwards were refused."""
        if self.refused is not None:
            return []
        rows = []
        for _, visit in sorted(self._visits.items()):
            injected = [math.sqrt(one.square) for one in self.injections]
            absolute = [math.sqrt(square) for square in visit.distance]
            relative = [one / math.sqrt(visit.square) if visit.square else math.nan for one in absolute]
            amplified = [
                one / start if start else math.nan for one, start in zip(absolute, injected, strict=True)
            ]
            dense = visit.keys["num_experts"] == 0
            values: Row = {
                "relative_distance": _mean(relative),
                "relative_distance_min": min(relative),
                "relative_distance_max": max(relative),
                "amplification": _mean(amplified),
                "flipped_share": None if dense else _mean(visit.flips) / visit.tokens,
                "distance_rate": self._rate(visit, relative=False),
                "relative_rate": self._rate(visit, relative=True),
            }
            rows.append(
                {
                    **visit.keys,
                    "num_tokens": visit.tokens,
                    "epsilon": EPSILON,
                    "num_directions": len(self.injections),
                    **settle(values),
                }
            )
        return rows

    def _rate(self, visit: _Visit, *, relative: bool) -> float | None:
        """Geometric mean over directions of the factor per pass at this layer, from the first pass to this."""
        passes = sorted(
            (one for one in self._visits.values() if one.layer_idx == visit.layer_idx),
            key=lambda one: one.loop_step,
        )
        passes = [one for one in passes if one.loop_step <= visit.loop_step]
        logs = []
        for direction in range(len(self.injections)):
            distances = [
                math.sqrt(one.distance[direction] / (one.square if relative and one.square else 1.0))
                for one in passes
            ]
            rate = geometric_rate(distances)
            if rate is None:
                return None
            logs.append(math.log(rate))
        return math.exp(_mean(logs))


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
