"""One optimizer step's partial vectors: microbatches are added on the device, raw tensors are never kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from loopscope.collect.exchange_layout import layout_of
from loopscope.collect.pairs import Pair, plan_pairs, spec_of
from loopscope.errors import MetricInputError
from loopscope.metrics import (
    Layout,
    PairTensors,
    Reduced,
    VisitTensors,
    reduce_pair,
    reduce_visit,
    visit_layout,
)
from loopscope.trace import TracePoint, TraceSink, VisitSpec

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

Key = VisitSpec | Pair
"""What a partial vector belongs to."""

OnFailure = Callable[[Key, Exception], None]
"""Hears of a visit or pair whose reduction failed; the others go on."""


@dataclass(slots=True)
class Entry:
    """Partial vectors of one visit or pair on the device, own storage."""

    layout: Layout
    reduced: Reduced
    microbatches: int = 1
    score_func: str = "softmax"
    score_space: str = "logits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The merged partial vectors of one visit or pair, on the host."""

    layout: Layout
    sums: NDArray[np.float64]
    maxima: NDArray[np.float64]
    num_microbatches: int
    """Microbatches in which it was seen."""
    score_func: str
    score_space: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Everything of one step on the host."""

    visits: dict[VisitSpec, Part]
    pairs: dict[Pair, Part]
    failed: frozenset[Key]
    """Visits and pairs that were seen, but whose reduction failed in some microbatch."""
    extra: NDArray[np.float64]
    """What else came along in the transfer."""


class StepAccumulator:
    """Partial sums of all visits and transitions of one step, on the device of the trace.

    Holds float64 vectors of its own and plain numbers; no tensor that was handed in, and no view of one.
    """

    def __init__(self) -> None:
        self.microbatches = 0
        self._entries: dict[Key, Entry] = {}
        self._failed: set[Key] = set()
        self._times_seen: dict[VisitSpec, int] = {}

    def add(
        self,
        sink: TraceSink,
        valid: Bool[Tensor, "B S"] | None = None,
        *,
        plan: Callable[[tuple[VisitSpec, ...]], tuple[Pair, ...]] = plan_pairs,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Reduce one microbatch's visits and transitions and add them. No value is read from the device.

        Args:
            sink: `unrolled_pos` → TracePoint.
            valid: [B, S] bool, True for tokens that count; None for all.
            plan: the transitions among the visits that are present.
            on_failure: called with a visit or pair whose reduction raised; None lets the exception out.

        Raises:
            MetricInputError: a visit breaks its contract, and there is no `on_failure`.
        """
        specs = tuple(sorted(self._spec(position, point) for position, point in sink.items()))
        for spec in specs:
            self._times_seen[spec] = self._times_seen.get(spec, 0) + 1
            self._guarded(spec, partial(_reduce_visit, spec, sink[spec.unrolled_pos], valid), on_failure)
        for pair in plan(specs):
            self._guarded(pair, partial(_reduce_pair, pair, sink, valid), on_failure)
        self.microbatches += 1

    def seen(self) -> dict[VisitSpec, int]:
        """Visit → microbatches in which it was seen, whether or not its reduction succeeded."""
        return dict(self._times_seen)

    def take(self) -> tuple[dict[Key, Entry], frozenset[Key]]:
        """The vectors, still on the device, and what failed; the accumulator forgets the vectors."""
        entries, self._entries = self._entries, {}
        return entries, frozenset(self._failed)

    def finish(self, extra: Float[Tensor, " n"] | None = None) -> StepParts:
        """Bring everything to the host in one transfer, and forget it.

        Args:
            extra: a float64 vector that is to come along.
        """
        entries, failed = self.take()
        return to_host(entries, failed, extra)

    def _guarded(self, key: Key, reduce: Callable[[], Entry], on_failure: OnFailure | None) -> None:
        if key in self._failed:
            return
        try:
            new = reduce()
        except Exception as error:
            if on_failure is None:
                raise
            self._failed.add(key)
            self._entries.pop(key, None)
            on_failure(key, error)
            return
        known = self._entries.get(key)
        if known is not None:
            new.reduced = known.reduced.merged(new.reduced)
            new.microbatches += known.microbatches
        self._entries[key] = new

    def _spec(self, position: int, point: TracePoint) -> VisitSpec:
        spec = spec_of(point)
        if spec.unrolled_pos != position:
            raise MetricInputError(
                f"the sink holds a point of unrolled_pos {spec.unrolled_pos} at key {position}, expected the "
                "key to be the point's own position. Record points with ACTIVE_TRACE_SINK.record(point)."
            )
        for known in self._times_seen:
            if known.unrolled_pos == position and known != spec:
                raise MetricInputError(
                    f"unrolled_pos {position} is {spec} in this microbatch and was {known} in an earlier one "
                    "of the same step; expected one layer per position. Do not change the depth within "
                    "a step."
                )
        return spec


def _reduce_visit(spec: VisitSpec, point: TracePoint, valid: Tensor | None) -> Entry:
    layout = visit_layout(spec.num_experts, spec.top_k)
    tensors = VisitTensors(
        router_logits=point.router_logits,
        router_probs=point.router_probs,
        topk_idx=point.topk_idx,
        topk_weights=point.topk_weights,
        residual=point.residual,
        score_func=point.score_func,
        selection_scores=point.selection_scores,
        expert_bias=point.expert_bias,
    )
    reduced = reduce_visit(tensors, _beside(point, valid), layout)
    return Entry(layout, reduced, score_func=point.score_func, score_space=tensors.score_space)


def _reduce_pair(pair: Pair, sink: TraceSink, valid: Tensor | None) -> Entry:
    source, target = pair.source, pair.target
    layout = layout_of(pair)
    first, second = sink[source.unrolled_pos], sink[target.unrolled_pos]
    tensors = PairTensors(
        from_residual=first.residual,
        to_residual=second.residual,
        before_residual=None if pair.before is None else sink[pair.before].residual,
        from_topk_idx=first.topk_idx if pair.same_layer else None,
        to_topk_idx=second.topk_idx if pair.same_layer else None,
    )
    return Entry(layout, reduce_pair(tensors, _beside(second, valid), layout))


def _beside(point: TracePoint, valid: Tensor | None) -> Tensor | None:
    """The mask on the device of the point; a mask made by a data loader often is on the host."""
    if valid is None or valid.device == point.residual.device:
        return valid
    return valid.to(point.residual.device, non_blocking=True)


def to_host(
    entries: Mapping[Key, Entry], failed: frozenset[Key], extra: Float[Tensor, " n"] | None = None
) -> StepParts:
    """One vector of everything, one copy to the host, cut apart again there."""
    vectors = [part for entry in entries.values() for part in (entry.reduced.sums, entry.reduced.maxima)]
    if extra is not None:
        vectors.append(extra)
    host: NDArray[np.float64] = torch.cat(vectors).cpu().numpy() if vectors else np.zeros(0)
    parts: dict[Key, Part] = {}
    start = 0
    for key, entry in entries.items():
        middle = start + entry.layout.n_sum
        end = middle + entry.layout.n_max
        parts[key] = Part(
            layout=entry.layout,
            sums=host[start:middle],
            maxima=host[middle:end],
            num_microbatches=entry.microbatches,
            score_func=entry.score_func,
            score_space=entry.score_space,
        )
        start = end
    return StepParts(
        visits={key: part for key, part in parts.items() if isinstance(key, VisitSpec)},
        pairs={key: part for key, part in parts.items() if isinstance(key, Pair)},
        failed=failed,
        extra=host[start:],
    )
