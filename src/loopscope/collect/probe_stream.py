"""Visits of a probe, reduced as they happen: partial sums, and the chosen experts that later pairs need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.collect.accumulate import OnFailure, StepAccumulator, StepParts
from loopscope.collect.pairs import Pair, spec_of
from loopscope.collect.traced_step import Failures
from loopscope.metrics.probe.shared import shared_counts
from loopscope.trace import StreamingWindow, TracePoint, TraceSink, VisitSpec


class LoopPair(NamedTuple):
    """Two visits of one physical layer of the loop, the earlier first."""

    source: VisitSpec
    target: VisitSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeParts:
    """One probe on the host."""

    steps: StepParts
    """Partial vectors of every visit; no pairs."""
    shared: dict[LoopPair, NDArray[np.float64]]
    """Tokens by number of shared experts [k + 1], per pair of loop steps of a layer."""
    losses: NDArray[np.float64]
    """Loss of every position that has a target [documents, S − 1]."""


class ProbeStream:
    """Takes the visits of a probe one by one, in one forward or several, and keeps no trace tensor.

    Of the visits of a forward it keeps the chosen experts, as copies of two bytes each, until that forward is
    over: every later loop step of the layer is compared with them. That part alone grows with R.
    """

    def __init__(self, on_failure: OnFailure | None = None) -> None:
        self._on_failure = on_failure
        self._accumulator = StepAccumulator()
        self._earlier: dict[int, list[tuple[VisitSpec, Tensor]]] = {}
        self._shared: dict[LoopPair, Tensor] = {}

    def add(self, point: TracePoint) -> None:
        """Reduce one visit.

        Raises:
            MetricInputError: it breaks its contract, and there is no `on_failure`.
        """
        self._accumulator.add({point.unrolled_pos: point}, plan=_no_pairs, on_failure=self._on_failure)
        spec = spec_of(point)
        if spec.block != "loop" or point.topk_idx is None:
            return
        narrow = torch.int16 if spec.num_experts < 2**15 else torch.int32
        chosen_NK = point.topk_idx.reshape(-1, spec.top_k).to(narrow, copy=True)
        earlier = self._earlier.setdefault(spec.layer_idx, [])
        for source, before_NK in earlier:
            if before_NK.shape == chosen_NK.shape:
                pair = LoopPair(source, spec)
                counts = shared_counts(before_NK, chosen_NK)
                self._shared[pair] = self._shared[pair] + counts if pair in self._shared else counts
        earlier.append((spec, chosen_NK))

    def next_forward(self) -> None:
        """Other documents follow: forget the chosen experts of these."""
        self._earlier.clear()

    def seen(self) -> set[VisitSpec]:
        """The visits that were recorded."""
        return set(self._accumulator.seen())

    def finish(self, per_token_loss: Tensor) -> ProbeParts:
        """Bring everything to the host in one transfer, and forget it.

        Args:
            per_token_loss: [B, S]; the last position has no target.
        """
        self._earlier.clear()
        shared, self._shared = self._shared, {}
        documents, length = per_token_loss.shape
        # The last position is sliced off, which keeps a caller's filler out of every sum.
        targets = per_token_loss[:, :-1].reshape(-1).double()
        extra = torch.cat([counts.to(targets.device).double() for counts in shared.values()] + [targets])
        parts = self._accumulator.finish(extra=extra)
        found, start = {}, 0
        for pair, counts in shared.items():
            found[pair] = parts.extra[start : start + len(counts)]
            start += len(counts)
        losses = parts.extra[start:].reshape(documents, length - 1)
        return ProbeParts(steps=parts, shared=found, losses=losses)


class ProbeWindow(StreamingWindow):
    """The window that all forwards of a probe record into; its visits are reduced at once.

    Args:
        isolate: a visit whose reduction raises costs its own row only.
        keep: False on a rank that writes nothing: visits are counted and dropped.
    """

    __slots__ = ("failures", "stream")

    def __init__(self, *, isolate: bool, keep: bool = True) -> None:
        self.failures = Failures()
        """Visits whose reduction raised."""
        self.stream = ProbeStream(self.failures.keep if isolate else None)
        super().__init__(self.stream.add if keep else _drop, self.stream.next_forward)

    @classmethod
    def of(cls, sink: TraceSink, *, isolate: bool) -> ProbeWindow:
        """`sink` itself where it is such a window; else one that took the visits that `sink` holds."""
        if isinstance(sink, ProbeWindow):
            return sink
        window = cls(isolate=isolate)
        for _, point in sorted(sink.items()):
            window.stream.add(point)
        window.faults.extend(getattr(sink, "faults", ()))
        return window


def _drop(point: TracePoint) -> None:
    del point


def _no_pairs(visits: tuple[VisitSpec, ...]) -> tuple[Pair, ...]:
    return ()
