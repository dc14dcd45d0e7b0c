"""Two checkpoints over the same documents: which visits changed, by how much, and whether that means anything."""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.analysis import require_same_corpus
from loopscope.errors import ProbeError
from loopscope.integrations.torchtitan.offline import OfflineSettings, encode_for
from loopscope.metrics.probe.compare import Interval, entropy_by_document, simultaneous_intervals
from loopscope.metrics.probe.specialisation import saturation
from loopscope.trace import NullCollector, TraceMeta, TraceSink, VisitSpec, run_probe_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitChange:
    """How one visit differs between two checkpoints."""

    visit: VisitSpec
    choice: Interval | None
    """Share of each token's experts that are others, 1 − |S ∩ S′|/k; None for a dense layer."""
    entropy: Interval | None
    """Change of the routing entropy, nats per token; None for a dense layer."""
    norm: Interval
    """Relative change of the hidden state's mean norm."""

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Those that there are."""
        return tuple(one for one in (self.choice, self.entropy, self.norm) if one is not None)

    @property
    def meaningful(self) -> bool:
        """True where an interval does not include 0."""
        return any(one.meaningful for one in self.intervals)

    @property
    def known(self) -> bool:
        """True where every number is finite and has an interval."""
        return all(one.known for one in self.intervals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What two checkpoints differ in."""

    corpus_name: str
    corpus_hash: str
    num_documents: int
    loss: Interval
    """Change of the loss, nats per token; an interval by itself."""
    visits: tuple[VisitChange, ...]
    """In order of depth. All their intervals hold together with 95%."""

    @property
    def num_intervals(self) -> int:
        """How many intervals hold together."""
        return sum(one.known for visit in self.visits for one in visit.intervals)


@dataclass(slots=True)
class _Visit:
    spec: VisitSpec
    norm_D: NDArray[np.float64]
    entropy_D: NDArray[np.float64] | None = None
    idx_DSK: NDArray[np.int64] | None = None


class _PerDocument(NullCollector):
    """Keeps numbers per document and each token's experts; no tensor of the trace."""

    def __init__(self) -> None:
        self.visits: dict[int, _Visit] = {}
        self.loss_D = np.zeros(0)

    def on_probe_step(
        self, step: int, sink: TraceSink, meta: TraceMeta, per_token_loss: Tensor
    ) -> dict[str, float]:
        """Reduce every visit to one number per document."""
        self.loss_D = per_token_loss[:, :-1].double().mean(1).cpu().numpy()
        for position, point in sorted(sink.items()):
            visit = _Visit(
                VisitSpec(**{item.name: getattr(point, item.name) for item in fields(VisitSpec)}),
                point.residual.double().norm(dim=-1).mean(1).cpu().numpy(),
            )
            if point.router_probs is not None and point.topk_idx is not None:
                visit.entropy_D = entropy_by_document(point.router_probs.double().cpu().numpy())
                visit.idx_DSK = point.topk_idx.long().cpu().numpy().copy()
            self.visits[position] = visit
        return {}


def compare_checkpoints(first: Path, second: Path, settings: OfflineSettings, *, seed: int = 0) -> Comparison:
    """Probe both checkpoints in memory, and compare them document by document.

    Raises:
        ProbeError: a checkpoint is incomplete or of another architecture than the other, or the two runs'
            tokenizers give different tokens (both hashes are named).
    """
    found: list[_PerDocument] = []
    corpora = []
    for checkpoint in (first, second):
        training = settings.source_of(checkpoint)
        training.check(checkpoint)
        corpus = encode_for(training, settings)
        corpora.append(corpus)
        require_same_corpus([corpora[0].corpus_hash], [corpus.corpus_hash])
        model = training.load(checkpoint, settings.param_dtype)
        ids = torch.from_numpy(corpus.input_ids.copy()).to(next(model.parameters()).device)
        collector = _PerDocument()
        batch_size = settings.batch_size or training.batch_size
        run_probe_forward(model, ids, collector=collector, step=0, batch_size=batch_size)
        found.append(collector)
    one, other = found
    if [visit.spec for visit in one.visits.values()] != [visit.spec for visit in other.visits.values()]:
        raise ProbeError(
            f"{first} has {len(one.visits)} visits and {second} has {len(other.visits)}, or they are of other "
            "layers, E or k; expected two checkpoints of one architecture"
        )
    draw = np.random.default_rng(seed)
    return Comparison(
        corpus_name=corpora[0].name,
        corpus_hash=corpora[0].corpus_hash,
        num_documents=len(one.loss_D),
        loss=simultaneous_intervals((other.loss_D - one.loss_D)[:, None], draw)[0],
        visits=_changes(one, other, draw),
    )


def _changes(one: _PerDocument, other: _PerDocument, draw: np.random.Generator) -> tuple[VisitChange, ...]:
    """All intervals of all visits are made at once, so that they hold together."""
    columns = {
        (position, name): difference_D
        for position, visit in one.visits.items()
        for name, difference_D in _differences(visit, other.visits[position]).items()
    }
    shares = [name == "choice" for _, name in columns]
    changes_DC = np.stack(list(columns.values()), axis=1)
    found = dict(zip(columns, simultaneous_intervals(changes_DC, draw, shares=shares), strict=True))
    return tuple(
        VisitChange(
            visit=visit.spec,
            choice=found.get((position, "choice")),
            entropy=found.get((position, "entropy")),
            norm=found[position, "norm"],
        )
        for position, visit in one.visits.items()
    )


def _differences(one: _Visit, other: _Visit) -> dict[str, NDArray[np.float64]]:
    """Per document [D], what changed at one visit."""
    found = {"norm": (other.norm_D - one.norm_D) / one.norm_D.mean()}
    if one.idx_DSK is not None and other.idx_DSK is not None:
        documents, _, top_k = one.idx_DSK.shape
        same_N = saturation(one.idx_DSK.reshape(-1, top_k), other.idx_DSK.reshape(-1, top_k))
        found["choice"] = 1 - same_N.reshape(documents, -1).mean(1)
    if one.entropy_D is not None and other.entropy_D is not None:
        found["entropy"] = other.entropy_D - one.entropy_D
    return found
