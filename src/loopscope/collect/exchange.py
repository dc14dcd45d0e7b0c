"""The two all-reduces of a traced step: one rank's partial vectors → every rank's, merged.

Every rank calls `exchange` with the last microbatch of every traced step, whatever it saw: nothing, padding only,
or an error. What it lacks is zero in the SUM buffer and the identity in the MAX buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.collect.accumulate import Entry, Key, Part, StepParts
from loopscope.collect.exchange_layout import HEADER, ExchangeLayout, Place
from loopscope.collect.pairs import Pair
from loopscope.collect.ranks import RankReducer
from loopscope.metrics import EMPTY, seal_rank
from loopscope.trace import VisitSpec

_STEP_SUMS = ("ranks", "failed_ranks", "unexpected", "sink_faults", "trace_bytes")
_STEP_MAXIMA = ("num_stacks", "minus_num_stacks", "num_microbatches")


@dataclass(kw_only=True, slots=True)
class Local:
    """What one rank brings along."""

    num_microbatches: int
    num_stacks: int | None = None
    """R of this rank's step; None where the step failed before that was known."""
    entries: dict[Key, Entry] = field(default_factory=dict)
    failed: frozenset[Key] = frozenset()
    sink_faults: int = 0
    trace_bytes: int = 0
    whole_step_failed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """All ranks together, on the host."""

    parts: StepParts
    num_stacks: int | None
    """R of the step; None where no rank knew it, or ranks disagree."""
    depth_differs: bool
    """Ranks ran different R in one step: their rows cannot be merged."""
    times_seen: dict[VisitSpec, int]
    """Visit → microbatches × ranks that saw it."""
    num_microbatches: int
    failed_ranks: int
    """Ranks whose whole step failed."""
    unexpected: int
    """Visits, over ranks, that nobody promised."""
    sink_faults: int
    trace_bytes: int
    """Largest possible: over all ranks."""


def exchange(layout: ExchangeLayout, local: Local, reducer: RankReducer) -> tuple[Tensor, Tensor]:
    """Fill both buffers and reduce them over ranks: exactly one SUM and one MAX, of fixed sizes. No sync.

    Returns:
        The reduced SUM and MAX buffers (float64), on the reducer's device.
    """
    try:
        buffers = _fill(layout, local, reducer.device)
    except Exception:  # noqa: BLE001 - this rank must still take part, or the others wait for it forever
        local = Local(num_microbatches=local.num_microbatches, whole_step_failed=True)
        buffers = _fill(layout, local, reducer.device)
    reducer.sum(buffers[0])
    reducer.max(buffers[1])
    return buffers


def unpack(layout: ExchangeLayout, sums: Tensor, maxima: Tensor) -> Exchanged:
    """The one transfer to the host, and the buffers cut apart."""
    host: NDArray[np.float64] = torch.cat([sums, maxima]).cpu().numpy()
    sum_head = dict(zip(_STEP_SUMS, host, strict=False))
    high, minus_low, num_microbatches = host[sums.numel() :][: len(_STEP_MAXIMA)]
    host_sums, host_maxima = host[len(_STEP_SUMS) : sums.numel()], host[sums.numel() + len(_STEP_MAXIMA) :]
    known = high > EMPTY / 10
    differs = bool(known and high != -minus_low)
    num_stacks = int(high) if known and not differs else None
    visits: dict[VisitSpec, Part] = {}
    pairs: dict[Pair, Part] = {}
    failed: set[Key] = set()
    times_seen: dict[VisitSpec, int] = {}
    if num_stacks is not None:
        visit_places, pair_places = layout.at(num_stacks)
        for spec, place in visit_places.items():
            part, failures = _part(place, host_sums, host_maxima, int(num_microbatches))
            times_seen[spec] = int(host_sums[place.sum_start])
            if failures:
                failed.add(spec)
            elif part is not None:
                visits[spec] = part
        for pair, place in pair_places.values():
            part, failures = _part(place, host_sums, host_maxima, int(num_microbatches))
            if failures:
                failed.add(pair)
            elif part is not None:
                pairs[pair] = part
    return Exchanged(
        parts=StepParts(visits=visits, pairs=pairs, failed=frozenset(failed), extra=np.zeros(0)),
        num_stacks=num_stacks,
        depth_differs=differs,
        times_seen=times_seen,
        num_microbatches=int(num_microbatches),
        failed_ranks=int(sum_head["failed_ranks"]),
        unexpected=int(sum_head["unexpected"]),
        sink_faults=int(sum_head["sink_faults"]),
        trace_bytes=int(sum_head["trace_bytes"]),
    )


def _part(
    place: Place, sums: NDArray[np.float64], maxima: NDArray[np.float64], num_microbatches: int
) -> tuple[Part | None, int]:
    seen, failures, sigmoid, selection_scores = sums[place.header]
    if not seen:
        return None, int(failures)
    part = Part(
        layout=place.layout,
        sums=sums[place.sums],
        maxima=maxima[place.maxima],
        num_microbatches=min(int(seen), num_microbatches),
        score_func="sigmoid" if sigmoid else "softmax",
        score_space="selection_scores" if selection_scores else "logits",
    )
    return part, int(failures)


def _fill(layout: ExchangeLayout, local: Local, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both buffers in the order of the layout."""
    entries = {} if local.whole_step_failed else _by_place(layout, local)
    failed = set() if local.whole_step_failed else _failed_places(layout, local)
    promised = len(entries)
    heads: list[float] = [
        1.0,
        float(local.whole_step_failed),
        float(0 if local.whole_step_failed else len(local.entries) - promised),
        float(local.sink_faults),
        float(local.trace_bytes),
    ]
    for place in layout.places:
        entry = entries.get(place.sum_start)
        heads += [
            float(entry.microbatches if entry else 0),
            float(place.sum_start in failed),
            float(entry is not None and entry.score_func == "sigmoid"),
            float(entry is not None and entry.score_space == "selection_scores"),
        ]
    head = torch.tensor(heads, dtype=torch.float64, device=device)
    depth = EMPTY if local.num_stacks is None or local.whole_step_failed else float(local.num_stacks)
    minus_depth = EMPTY if depth == EMPTY else -depth
    tops = [depth, minus_depth, float(local.num_microbatches)]
    sum_pieces = [head[: len(_STEP_SUMS)]]
    max_pieces = [torch.tensor(tops, dtype=torch.float64, device=device)]
    start = len(_STEP_SUMS)
    for place in layout.places:
        sum_pieces.append(head[start : start + len(HEADER)])
        start += len(HEADER)
        entry = entries.get(place.sum_start)
        if entry is None:
            sum_pieces.append(head.new_zeros(place.layout.n_sum))
            max_pieces.append(head.new_full((place.layout.n_max,), EMPTY))
        else:
            sealed = seal_rank(entry.layout, entry.reduced) if entry.layout.kind == "visit" else entry.reduced
            sum_pieces.append(sealed.sums)
            max_pieces.append(sealed.maxima)
    return torch.cat(sum_pieces), torch.cat(max_pieces)


def _by_place(layout: ExchangeLayout, local: Local) -> dict[int, Entry]:
    """Start of a place → this rank's entry. What has no place was not promised."""
    if local.num_stacks is None:
        return {}
    visits, pairs = layout.at(local.num_stacks)
    found: dict[int, Entry] = {}
    for key, entry in local.entries.items():
        place = visits.get(key) if isinstance(key, VisitSpec) else pairs.get(key.key, (None, None))[1]
        if place is not None:
            found[place.sum_start] = entry
    return found


def _failed_places(layout: ExchangeLayout, local: Local) -> set[int]:
    if local.num_stacks is None:
        return set()
    visits, pairs = layout.at(local.num_stacks)
    places = [
        visits.get(key) if isinstance(key, VisitSpec) else pairs.get(key.key, (None, None))[1]
        for key in local.failed
    ]
    return {place.sum_start for place in places if place is not None}
