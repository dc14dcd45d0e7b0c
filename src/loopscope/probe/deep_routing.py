"""What a deep probe keeps of the routing of every visit, on the host: chosen experts and choice scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.trace import TracePoint, TraceSink

Row = dict[str, object]
Tables = dict[str, list[Row]]
Chosen = Mapping[int, NDArray[np.int64]]
"""`unrolled_pos` → chosen experts [D, S, k]."""


@dataclass(slots=True)
class VisitRouting:
    """One visit over all documents so far; copies of its own."""

    keys: Row
    """The visit's columns of a probe row."""
    score_space: str
    bounded: bool
    """True for scores that cannot be normal: probabilities, or a sigmoid's."""
    idx: list[NDArray[np.int64]] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    @property
    def idx_DSK(self) -> NDArray[np.int64]:  # noqa: N802 (shape suffix)
        """Chosen experts [D, S, k]."""
        return np.concatenate(self.idx)

    @property
    def scores_DSE(self) -> Tensor:  # noqa: N802 (shape suffix)
        """Choice scores [D, S, E], float32, on the host."""
        return torch.cat(self.scores)


class Routing:
    """The visits with a router, in order of depth."""

    def __init__(self, *, with_scores: bool) -> None:
        self._with_scores = with_scores
        self._visits: dict[int, VisitRouting] = {}

    def __iter__(self) -> Iterator[VisitRouting]:
        return (visit for _, visit in sorted(self._visits.items()))

    def add(self, sink: TraceSink, num_loop_steps: int) -> None:
        """Copy what is needed of the next documents."""
        for position, point in sink.items():
            if point.topk_idx is None or point.router_logits is None:
                continue
            visit = self._visits.get(position)
            if visit is None:
                visit = self._visits[position] = _new(point, num_loop_steps)
            visit.idx.append(point.topk_idx.long().cpu().numpy().copy())
            if self._with_scores:
                scores = point.router_logits if point.selection_scores is None else point.selection_scores
                visit.scores.append(scores.float().cpu().clone())

    def chosen(self) -> dict[int, NDArray[np.int64]]:
        """`unrolled_pos` → chosen experts [D, S, k]."""
        return {position: visit.idx_DSK for position, visit in self._visits.items()}


def visit_keys(point: TracePoint, num_loop_steps: int) -> Row:
    """The columns that name a visit; loop step and layer are null outside the loop."""
    inside = point.block == "loop"
    return {
        "block": point.block,
        "unrolled_pos": point.unrolled_pos,
        "loop_step": point.loop_step if inside else None,
        "layer_idx": point.layer_idx if inside else None,
        "num_loop_steps": num_loop_steps,
        "num_experts": point.num_experts,
        "top_k": point.top_k,
        "score_func": None if point.is_dense else point.score_func,
    }


def _new(point: TracePoint, num_loop_steps: int) -> VisitRouting:
    space = "logits" if point.selection_scores is None else "selection_scores"
    return VisitRouting(visit_keys(point, num_loop_steps), space, bounded=space != "logits")
