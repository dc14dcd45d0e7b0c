"""Perturbed forwards beside a clean one → rows of probe_perturbation."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

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
from loopscope.probe.deep_rows import with_null_reasons
from loopscope.probe.deep_spill import CleanVisits
from loopscope.trace import TracePoint


class Injection:
    """Disturbs the loop's input once per forward, in a direction that one generator draws."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._done = generator, False
        self.square = 0.0
        """Σ of the squared length of everything injected so far."""

    @contextmanager
    def into(self, entry: nn.Module) -> Iterator[None]:
        """While the block runs, the first call of `entry` gets a disturbed first argument."""
        self._done = False
        # Before any other hook: FSDP's own would already have cast the input.
        handle = entry.register_forward_pre_hook(self._perturb, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _perturb(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
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
    """Distances over the documents so far, per loop visit and direction; numbers only.

    Over some documents: `add_clean` for every visit of a second clean forward, then `add` for those of a forward
    per direction, and `end_forward` after each. Visits come as they happen.
    """

    def __init__(self, num_directions: int, seed: int) -> None:
        self.injections = [
            Injection(torch.Generator().manual_seed(seed + number)) for number in range(num_directions)
        ]
        self.refused: str | None = None
        """Why nothing can be reported; None while all is well."""
        self._visits: dict[int, _Visit] = {}
        self._seen: set[int] = set()

    def add_clean(self, clean: CleanVisits, again: TracePoint) -> None:
        """A visit of the second clean forward: it must be equal bit for bit, in float32."""
        position = again.unrolled_pos
        self._seen.add(position)
        if again.residual.dtype != torch.float32:
            self.refused = f"the forward is in {again.residual.dtype}, not in float32"
        if position not in clean or not torch.equal(clean.residual(position), again.residual):
            # NaN is not equal to itself: that says nothing of how well the forward repeats.
            self.refused = self.refused or (
                "two clean forwards differ"
                if again.residual.isfinite().all()
                else "the clean forward is not finite"
            )
        if again.block != "loop":
            return
        visit = self._visits.setdefault(
            position,
            _Visit(
                visit_keys(again),
                again.layer_idx,
                again.loop_step,
                distance=[0.0] * len(self.injections),
                flips=[0.0] * len(self.injections),
            ),
        )
        visit.square += frobenius(again.residual, again.residual)[1] ** 2
        visit.tokens += again.residual[..., 0].numel()

    def add(self, direction: int, clean: CleanVisits, disturbed: TracePoint) -> None:
        """A visit of a forward over the same documents that was disturbed in one direction."""
        position = disturbed.unrolled_pos
        self._seen.add(position)
        if (visit := self._visits.get(position)) is None:
            return
        visit.distance[direction] += frobenius(clean.residual(position), disturbed.residual)[0] ** 2
        idx = clean.topk_idx(position)
        if idx is not None and disturbed.topk_idx is not None:
            visit.flips[direction] += flipped_share(idx, disturbed.topk_idx) * idx[..., 0].numel()

    def end_forward(self, clean: CleanVisits) -> None:
        """A second clean or a disturbed forward is over: it must have shown the visits of the first."""
        if len(self._seen) < len(clean):
            self.refused = self.refused or "two forwards over the same documents recorded different visits"
        self._seen.clear()

    def set_depth(self, num_loop_steps: int) -> None:
        """Say how many passes the loop made."""
        for visit in self._visits.values():
            visit.keys["num_loop_steps"] = num_loop_steps

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
            values: Row = {
                "relative_distance": fmean(relative),
                "relative_distance_min": min(relative),
                "relative_distance_max": max(relative),
                "amplification": fmean(amplified),
                "flipped_share": fmean(visit.flips) / visit.tokens if visit.keys["num_experts"] else None,
                "distance_rate": self._rate(visit, relative=False),
                "relative_rate": self._rate(visit, relative=True),
            }
            rows.append(
                {
                    **visit.keys,
                    "num_tokens": visit.tokens,
                    "epsilon": EPSILON,
                    "num_directions": len(self.injections),
                    **with_null_reasons(values),
                }
            )
        return rows

    def _rate(self, visit: _Visit, *, relative: bool) -> float | None:
        """Geometric mean over directions of the factor per pass at this layer, from the first pass to this."""
        passes = sorted(
            (
                one
                for one in self._visits.values()
                if one.layer_idx == visit.layer_idx and one.loop_step <= visit.loop_step
            ),
            key=lambda one: one.loop_step,
        )
        rates = [
            geometric_rate(
                [
                    math.sqrt(one.distance[direction] / (one.square if relative and one.square else 1.0))
                    for one in passes
                ]
            )
            for direction in range(len(self.injections))
        ]
        logs = [math.log(rate) for rate in rates if rate is not None]
        return math.exp(fmean(logs)) if len(logs) == len(rates) else None
