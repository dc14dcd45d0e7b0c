"""What a deep probe keeps of the routing of every visit, in a file: chosen experts and choice scores."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.catalog.traits import NO_SETS
from loopscope.probe.deep_spill import SpillFile, Stored
from loopscope.trace import TracePoint

Row = dict[str, object]
Tables = dict[str, list[Row]]
Chosen = Mapping[int, NDArray[np.int64]]
"""`unrolled_pos` → chosen experts [D, S, k]."""


@dataclass(slots=True)
class VisitRouting:
    """One visit over all documents so far; its tensors lie in the files of its `RoutingRecorder`."""

    keys: Row
    """The visit's columns of a probe row."""
    score_space: str
    bounded: bool
    """True for scores that cannot be normal: probabilities, or a sigmoid's."""
    idx_file: SpillFile
    scores_file: SpillFile
    idx: list[Stored] = field(default_factory=list)
    scores: list[Stored] = field(default_factory=list)

    @property
    def idx_DSK(self) -> NDArray[np.int64]:  # noqa: N802 (shape suffix)
        """Chosen experts [D, S, k], read anew."""
        return _read_idx(self.idx_file, self.idx)

    @property
    def scores_DSE(self) -> Tensor:  # noqa: N802 (shape suffix)
        """Choice scores [D, S, E], float32, on the host, read anew."""
        return torch.cat([self.scores_file.get(stored) for stored in self.scores])


class ChosenExperts(Mapping[int, NDArray[np.int64]]):
    """`unrolled_pos` → chosen experts [D, S, k]; every look reads them from their file."""

    def __init__(self, file: SpillFile, visits: Mapping[int, tuple[Stored, ...]], corpus_hash: str) -> None:
        self._file, self._visits = file, dict(visits)
        self.corpus_hash = corpus_hash
        """Over which tokens."""

    def __getitem__(self, position: int) -> NDArray[np.int64]:
        return _read_idx(self._file, self._visits[position])

    def __iter__(self) -> Iterator[int]:
        return iter(self._visits)

    def __len__(self) -> int:
        return len(self._visits)


class RoutingRecorder:
    """The visits with a router, in order of depth.

    Chosen experts, two bytes each, lie in a file of their own: the next probe is compared with them, long after
    the scores are gone.
    """

    def __init__(self) -> None:
        self._idx_file, self._scores_file = SpillFile(), SpillFile()
        self._visits: dict[int, VisitRouting] = {}

    def __iter__(self) -> Iterator[VisitRouting]:
        return (visit for _, visit in sorted(self._visits.items()))

    def add(self, point: TracePoint) -> None:
        """Keep what is needed of a visit of the next documents."""
        if point.topk_idx is None or point.router_logits is None or not NO_SETS.isdisjoint(point.traits):
            return
        added = point.selection_scores is not None
        visit = self._visits.setdefault(
            point.unrolled_pos,
            VisitRouting(
                visit_keys(point),
                score_space="selection_scores" if added else "logits",
                bounded=added,
                idx_file=self._idx_file,
                scores_file=self._scores_file,
            ),
        )
        narrow = torch.int16 if point.num_experts < 2**15 else torch.int32
        visit.idx.append(self._idx_file.put(point.topk_idx.to(narrow).cpu()))
        scores = point.router_logits if point.selection_scores is None else point.selection_scores
        visit.scores.append(self._scores_file.put(scores.float().cpu()))

    def set_depth(self, num_loop_steps: int) -> None:
        """Say how many passes the loop made, which a forward shows at its end only."""
        for visit in self._visits.values():
            visit.keys["num_loop_steps"] = num_loop_steps

    def chosen(self, corpus_hash: str) -> ChosenExperts:
        """What every visit chose."""
        visits = {position: tuple(visit.idx) for position, visit in self._visits.items()}
        return ChosenExperts(self._idx_file, visits, corpus_hash)


def visit_keys(point: TracePoint) -> Row:
    """The columns that name a visit; loop step and layer are null outside the loop, the depth is yet unknown."""
    inside = point.block == "loop"
    return {
        "block": point.block,
        "unrolled_pos": point.unrolled_pos,
        "loop_step": point.loop_step if inside else None,
        "layer_idx": point.layer_idx if inside else None,
        "num_loop_steps": None,
        "num_experts": point.num_experts,
        "top_k": point.top_k,
        "score_func": None if point.is_dense else point.score_func,
    }


def _read_idx(file: SpillFile, parts: list[Stored] | tuple[Stored, ...]) -> NDArray[np.int64]:
    return np.concatenate([file.get(stored).long().numpy() for stored in parts])
