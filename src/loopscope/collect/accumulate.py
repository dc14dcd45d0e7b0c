"""One optimizer step's partial vectors: microbatches are added on the device, raw tensors are never kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from loopscope.catalog.traits import TRAITS
from loopscope.collect.depths import Visits, merge_depths
from loopscope.collect.error_text import describe
from loopscope.collect.exchange_layout import ExchangeLayout, layout_of
from loopscope.collect.pairs import Key, Pair, describe_key, plan_pairs, spec_of
from loopscope.collect.partials import Partial, StepPartials, pack, unpack
from loopscope.errors import MetricInputError
from loopscope.metrics import PairTensors, Reduced, VisitTensors, reduce_pair, reduce_visit
from loopscope.trace import TracePoint, TraceSink, VisitSpec

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class StepAccumulator:
    """Partial sums of all visits and transitions of one step, on the device of the trace.

    Holds float64 vectors of its own, plain numbers and text; no tensor that was handed in, and no view of one.

    Args:
        isolate: a visit or pair whose reduction raises is noted and the others go on; without it the exception leaves.
    """

    def __init__(self, *, isolate: bool = False) -> None:
        self.microbatches = 0
        self._groups: dict[Visits | None, dict[Key, Partial]] = {}
        """Visits of a microbatch → what was seen, in the order in which it first was."""
        self.sink_faults: list[str] = []
        """A line for every position that a window recorded twice."""
        self.trace_bytes = 0
        """Bytes of all tensors of the windows: what recording kept alive until the callbacks."""
        self._isolate = isolate
        self._visits: dict[int, VisitSpec] = {}
        self._merged: dict[Key, Partial] | None = None

    def add(
        self,
        sink: TraceSink,
        valid: Bool[Tensor, "B S"] | Mapping[int, Tensor | None] | None = None,
        *,
        plan: Callable[[tuple[VisitSpec, ...]], tuple[Pair, ...]] = plan_pairs,
        mixed: bool = False,
    ) -> None:
        """Reduce one microbatch's visits and transitions and add them. No value is read from the device.

        Args:
            sink: `unrolled_pos` → TracePoint.
            valid: [B, S] bool, True for tokens that count; None for all.
            plan: the transitions among the visits that are present.
            mixed: microbatches may have different visits; without it another visit at a position is an error.

        Raises:
            MetricInputError: a key is not its point's position, or another visit was at a position before; a visit
                breaks its contract, without `isolate`.
        """
        self.trace_bytes += sum(
            tensor.nbytes for point in sink.values() for tensor in point.tensors().values()
        )
        self.sink_faults += getattr(sink, "faults", ())
        specs = tuple(sorted(_spec(position, point) for position, point in sink.items()))
        group = self._groups.setdefault(specs if mixed else None, {})
        if not mixed:
            self._check(specs)
        for spec in specs:
            self._add(group, spec, partial(_reduce_visit, spec, sink[spec.unrolled_pos], _of(spec, valid)))
        for pair in plan(specs):
            if _sees_the_same(pair, sink):
                self._add(group, pair, partial(_reduce_pair, pair, sink, _of(pair.target, valid)))
        self.microbatches += 1
        self._merged = None

    @property
    def partials(self) -> Mapping[Key, Partial]:
        """What was seen, under one set of positions."""
        if self._merged is None:
            groups = {visits or (): found for visits, found in self._groups.items()}
            self._merged = next(iter(groups.values()), {}) if len(groups) < 2 else merge_depths(groups)
        return self._merged

    @property
    def visits(self) -> Collection[VisitSpec]:
        """The visits that were there, whether or not their reduction succeeded."""
        return [key for key in self.partials if isinstance(key, VisitSpec)]

    def failures(self) -> dict[Key, str]:
        """Visit or pair → why its reduction failed."""
        return {key: found.failure for key, found in self.partials.items() if found.reduced is None}

    def layout(self) -> ExchangeLayout:
        """A layout of what was seen."""
        return ExchangeLayout({key: found.layout for key, found in self.partials.items()})

    def finish(self, extra: Float[Tensor, " n"] | None = None) -> StepPartials:
        """Bring everything to the host in one transfer.

        Args:
            extra: a float64 vector that is to come along.
        """
        layout = self.layout()
        return unpack(layout, pack(layout, self.partials, num_microbatches=self.microbatches), extra)

    def _add(self, group: dict[Key, Partial], key: Key, reduce: Callable[[], Partial]) -> None:
        known = group.get(key)
        if known is not None and known.reduced is None:
            known.times_seen += 1
            return
        try:
            new = reduce()
        except Exception as error:
            if not self._isolate:
                raise
            visits = [other for other in group if isinstance(other, VisitSpec)]
            new = Partial(failure=f"{describe_key(key, visits)}: {describe(error)}")
        if known is not None:
            new.times_seen += known.times_seen
            if new.reduced is not None and known.reduced is not None:
                new.reduced = known.reduced.merged(new.reduced)
        group[key] = new

    def _check(self, specs: Visits) -> None:
        for spec in specs:
            known = self._visits.setdefault(spec.unrolled_pos, spec)
            if known != spec:
                raise MetricInputError(
                    f"unrolled_pos {spec.unrolled_pos} is {spec} in this microbatch and was {known} in an earlier "
                    "one of the same step; expected one layer per position. Do not change the depth within a step."
                )


def _spec(position: int, point: TracePoint) -> VisitSpec:
    spec = spec_of(point)
    if spec.unrolled_pos != position:
        raise MetricInputError(
            f"the sink holds a point of unrolled_pos {spec.unrolled_pos} at key {position}, expected the "
            "key to be the point's own position. Record points with ACTIVE_TRACE_SINK.record(point)."
        )
    return spec


def _sees_the_same(pair: Pair, sink: TraceSink) -> bool:
    """False where a block's calls each see a part of the tokens, and these are of different parts."""
    ends = sink[pair.source.unrolled_pos], sink[pair.target.unrolled_pos]
    return pair.kind == "within_step" or not any("chunks" in point.traits for point in ends)


def _reduce_visit(spec: VisitSpec, point: TracePoint, valid: Tensor | None) -> Partial:
    layout = layout_of(spec)
    if not point.residual.numel():
        return Partial(layout, Reduced.nothing(layout, point.residual.device), score_func=point.score_func)
    tensors = VisitTensors(
        router_logits=point.router_logits,
        router_probs=point.router_probs,
        topk_idx=point.topk_idx,
        topk_weights=point.topk_weights,
        residual=point.residual,
        score_func=point.score_func,
        selection_scores=point.selection_scores,
        expert_bias=point.expert_bias,
        dropped=point.dropped,
        traits=point.traits,
    )
    reduced = reduce_visit(tensors, _beside(point, valid), layout)
    return Partial(layout, reduced, score_func=point.score_func, score_space=tensors.score_space)


def _reduce_pair(pair: Pair, sink: TraceSink, valid: Tensor | None) -> Partial:
    layout = layout_of(pair)
    first, second = sink[pair.source.unrolled_pos], sink[pair.target.unrolled_pos]
    if not second.residual.numel():
        return Partial(layout, Reduced.nothing(layout, second.residual.device))
    there = second.residual.device  # the layers of one model may lie on several
    tensors = PairTensors(
        from_residual=first.residual.to(there),
        to_residual=second.residual,
        before_residual=None if pair.before is None else sink[pair.before].residual.to(there),
        from_topk_idx=first.topk_idx.to(there) if pair.same_layer and first.topk_idx is not None else None,
        to_topk_idx=second.topk_idx if pair.same_layer else None,
        traits=tuple(name for name in TRAITS if name in first.traits or name in second.traits),
    )
    return Partial(layout, reduce_pair(tensors, _beside(second, valid), layout))


def _of(visit: VisitSpec, valid: Tensor | Mapping[int, Tensor | None] | None) -> Tensor | None:
    return valid.get(visit.unrolled_pos) if isinstance(valid, Mapping) else valid


def _beside(point: TracePoint, valid: Tensor | None) -> Tensor | None:
    """The mask on the device of the point, where a data loader's often is not, and of the shape of its tokens: a
    block that works on [T, d] has the batch's sequences one behind the other."""
    if valid is None:
        return None
    batch, seq = point.residual.shape[:2]
    if valid.shape != (batch, seq) and batch == 1 and valid.numel() == seq:
        valid = valid.reshape(1, seq)
    if valid.device == point.residual.device:
        return valid
    return valid.to(point.residual.device, non_blocking=True)
