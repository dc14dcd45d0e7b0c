"""Visits of a probe, reduced as they happen: partial sums, and the chosen experts that later pairs need."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.catalog.traits import NO_SETS
from loopscope.collect.accumulate import StepAccumulator
from loopscope.collect.pairs import Pair, spec_of
from loopscope.collect.partials import StepPartials
from loopscope.metrics.probe.shared import shared_counts
from loopscope.trace import StreamingWindow, TracePoint, TraceSink, VisitSpec

LoopPair = tuple[VisitSpec, VisitSpec]
"""Two visits of one physical layer of the loop, the earlier first."""


class ProbeStream:
    """Takes the visits of a probe one by one, in one forward or several, and keeps no trace tensor.

    Of the visits of a forward it keeps the chosen experts, as copies of two bytes each, until that forward is
    over: every later loop step of the layer is compared with them. That part alone grows with R.

    Args:
        isolate: a visit whose reduction raises costs its own row only.
    """

    def __init__(self, *, isolate: bool) -> None:
        self.accumulated = StepAccumulator(isolate=isolate)
        self._earlier: dict[int, list[tuple[VisitSpec, Tensor]]] = {}
        self._shared: dict[LoopPair, Tensor] = {}

    def finish(
        self, per_token_loss: Tensor
    ) -> tuple[StepPartials, dict[LoopPair, NDArray[np.float64]], NDArray[np.float64]]:
        """Bring everything to the host in one transfer, and forget it.

        Args:
            per_token_loss: [B, S]; the last position has no target.

        Returns:
            Partial vectors of every visit; tokens by number of shared experts [k + 1] per pair of loop steps of a
            layer; the loss of every position that has a target [documents, S − 1].
        """
        self.next_forward()
        shared, self._shared = self._shared, {}
        documents, length = per_token_loss.shape
        # The last position is sliced off, which keeps a caller's filler out of every sum.
        targets = per_token_loss[:, :-1].reshape(-1).double()
        extra = torch.cat([counts.to(targets.device).double() for counts in shared.values()] + [targets])
        partials = self.accumulated.finish(extra)
        *by_pair, losses = np.split(
            partials.extra, np.cumsum([len(counts) for counts in shared.values()], dtype=int)
        )
        return partials, dict(zip(shared, by_pair, strict=True)), losses.reshape(documents, length - 1)

    def add(self, point: TracePoint) -> None:
        """Reduce one visit.

        Raises:
            MetricInputError: it breaks its contract, without `isolate`.
        """
        self.accumulated.add({point.unrolled_pos: point}, plan=_no_pairs)
        spec = spec_of(point)
        if spec.block != "loop" or point.topk_idx is None or not NO_SETS.isdisjoint(point.traits):
            return
        narrow = torch.int16 if spec.num_experts < 2**15 else torch.int32
        chosen_NK = point.topk_idx.reshape(-1, spec.top_k).to(narrow, copy=True)
        earlier = self._earlier.setdefault(spec.layer_idx, [])
        for source, before_NK in earlier:
            if before_NK.shape == chosen_NK.shape:
                counts = shared_counts(before_NK, chosen_NK)
                known = self._shared.get((source, spec))
                self._shared[source, spec] = counts if known is None else known + counts
        earlier.append((spec, chosen_NK))

    def next_forward(self) -> None:
        """Other documents follow, or none: forget the chosen experts of these."""
        self._earlier.clear()


class ProbeWindow(StreamingWindow):
    """The window that all forwards of a probe record into; its visits are reduced at once.

    Args:
        isolate: a visit whose reduction raises costs its own row only.
        keep: False on a rank that writes nothing: visits are counted and dropped.
    """

    __slots__ = ("stream",)

    def __init__(self, *, isolate: bool, keep: bool = True) -> None:
        self.stream = ProbeStream(isolate=isolate)
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
