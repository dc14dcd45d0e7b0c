"""Partial vectors of one step: on the device one by one, in one buffer for the exchange, and merged on the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.collect.exchange_layout import SLOT_HEADER, STEP_MAXIMA, STEP_SUMS, ExchangeLayout
from loopscope.collect.pairs import Key
from loopscope.metrics import EMPTY, Layout, Reduced, seal_rank
from loopscope.metrics.tensors import SCORE_FUNCS
from loopscope.trace import VisitSpec


@dataclass(slots=True)
class Partial:
    """What one rank has of one visit or pair so far; its vectors lie on the device, in storage of their own."""

    layout: Layout | None = None
    reduced: Reduced | None = None
    """None where the reduction failed in some microbatch."""
    times_seen: int = 1
    """Microbatches in which it was there."""
    score_func: str = "softmax"
    score_space: str = "logits"
    failure: str = ""
    """Why the reduction failed, as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialGroup:
    """The merged vectors of the V visits (or pairs) of one layout, on the host."""

    layout: Layout
    keys: list[Key]
    """[V]"""
    sums: NDArray[np.float64]
    """[V, n_sum]"""
    maxima: NDArray[np.float64]
    """[V, n_max]"""
    num_microbatches: list[int]
    """[V]: microbatches in which it was seen (on the rank that saw most)."""
    score_funcs: list[str]
    score_spaces: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPartials:
    """One step on the host, merged over microbatches and ranks."""

    groups: list[PartialGroup]
    failed: list[Key]
    """Visits and pairs that were seen, but whose reduction failed in some microbatch on some rank."""
    times_seen: dict[VisitSpec, int]
    """Visit → microbatches × ranks in which it was there, whether or not its reduction succeeded."""
    num_stacks: int | None
    """R of the step; None where no rank knew it, or ranks disagree."""
    depth_differs: bool
    """Ranks ran different R in one step: their rows cannot be merged."""
    step_differs: bool
    """Ranks are at different steps: the same."""
    num_microbatches: int
    counts: dict[str, int]
    """What `STEP_SUMS` names, over all ranks."""
    extra: NDArray[np.float64]
    """What else came along in the transfer."""


def pack(
    layout: ExchangeLayout,
    partials: Mapping[Key, Partial],
    device: torch.device | None = None,
    *,
    num_microbatches: int,
    step: int = 0,
    num_stacks: int | None = None,
    failed: bool = False,
    sink_faults: int = 0,
    trace_bytes: int = 0,
) -> Tensor:
    """One rank's SUM and MAX buffer, one behind the other, in the order of `layout`. No sync.

    Args:
        layout: says which slot is whose.
        partials: of this rank. What it lacks is zero in the SUM buffer and the identity in the MAX buffer.
        device: of the buffer; None: where the vectors are.
        num_microbatches: of the step.
        step: its number.
        num_stacks: R of this rank's step; None where it is not known.
        failed: the step failed on this rank as a whole.
        sink_faults: positions that were recorded twice.
        trace_bytes: bytes of the step's traces.

    Returns:
        float64 [n_sum + n_max].
    """
    slots = layout.at(num_stacks)
    placed = {
        slot: found
        for key, found in partials.items()
        if (slot := slots.get(key)) is not None
        and (found.reduced is None or found.layout == layout.layouts[slot])
    }
    head = [float(failed), float(len(partials) - len(placed)), float(sink_faults), float(trace_bytes)]
    for slot in range(len(layout.layouts)):
        if (found := placed.get(slot)) is None:
            head += [0.0] * len(SLOT_HEADER)
            continue
        ok = found.reduced is not None
        head += (
            float(found.times_seen),
            float(not ok),
            float(ok and found.score_space == "selection_scores"),
            *(float(ok and found.score_func == name) for name in SCORE_FUNCS),
        )
    sums: list[Tensor] = []
    maxima: list[Tensor] = []
    for each in layout.ranges:
        for slot in range(each.slots.start, each.slots.stop):
            found = placed.get(slot)
            if found is None or found.reduced is None:
                sums.append(torch.zeros(each.layout.n_sum, dtype=torch.float64, device=device))
                maxima.append(torch.full((each.layout.n_max,), EMPTY, dtype=torch.float64, device=device))
                continue
            reduced = found.reduced
            if layout.expected and each.layout.kind == "visit":
                reduced = seal_rank(
                    each.layout, reduced
                )  # what is a rank's own, before vectors of ranks merge
            sums.append(reduced.sums)
            maxima.append(reduced.maxima)
    if device is None:
        device = sums[0].device if sums else torch.device("cpu")
    sums, maxima = ([vector.to(device, non_blocking=True) for vector in each] for each in (sums, maxima))
    depth = EMPTY if num_stacks is None else float(num_stacks)
    tops = [depth, EMPTY if num_stacks is None else -depth, float(num_microbatches)]
    tops += [float(step), -float(step)]
    # Not waited for: both are read when everything is.
    header, top = (
        torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True) for values in (head, tops)
    )
    return torch.cat([header, *sums, top, *maxima])


def unpack(layout: ExchangeLayout, buffer: Tensor, extra: Tensor | None = None) -> StepPartials:
    """The one transfer to the host, and the merged buffers cut apart.

    Args:
        layout: that of `pack`.
        buffer: what `pack` gave, merged over ranks.
        extra: a float64 vector that is to come along.
    """
    host: NDArray[np.float64] = (buffer if extra is None else torch.cat([buffer, extra])).cpu().numpy()
    sums, maxima = host[: layout.n_sum], host[layout.n_sum : layout.n_sum + layout.n_max]
    highest, minus_lowest, num_microbatches, last_step, minus_first_step = maxima[: len(STEP_MAXIMA)].tolist()
    known = highest > EMPTY / 10
    differs, step_differs = known and highest != -minus_lowest, last_step != -minus_first_step
    num_stacks = int(highest) if known and not differs and not step_differs else None
    headers = (
        sums[len(STEP_SUMS) :][: len(SLOT_HEADER) * len(layout.layouts)]
        .reshape(-1, len(SLOT_HEADER))
        .tolist()
    )
    keys: dict[int, Key] = {}
    failed: list[Key] = []
    times_seen: dict[VisitSpec, int] = {}
    for key, slot in layout.at(num_stacks).items():
        seen, failures, *_ = headers[slot]
        if seen and isinstance(key, VisitSpec):
            times_seen[key] = int(seen)
        if failures:
            failed.append(key)
        elif seen:
            keys[slot] = key
    groups = []
    for each in layout.ranges:
        first, end = each.slots.start, each.slots.stop
        at = [slot for slot in range(first, end) if slot in keys]
        if not at:
            continue
        block = sums[each.sums].reshape(end - first, -1), maxima[each.maxima].reshape(end - first, -1)
        if len(at) < end - first:
            block = block[0][np.array(at) - first], block[1][np.array(at) - first]
        groups.append(
            PartialGroup(
                layout=each.layout,
                keys=[keys[slot] for slot in at],
                sums=block[0],
                maxima=block[1],
                num_microbatches=[int(min(headers[slot][0], num_microbatches)) for slot in at],
                score_funcs=[_score_func(headers[slot]) for slot in at],
                score_spaces=["selection_scores" if headers[slot][2] else "logits" for slot in at],
            )
        )
    return StepPartials(
        groups=groups,
        failed=failed,
        times_seen=times_seen,
        num_stacks=num_stacks,
        depth_differs=differs,
        step_differs=step_differs,
        num_microbatches=int(num_microbatches),
        counts={name: int(value) for name, value in zip(STEP_SUMS, sums, strict=False)},
        extra=host[layout.n_sum + layout.n_max :],
    )


def _score_func(header: list[float]) -> str:
    """The function that the ranks which saw the visit name; of pairs, the first."""
    flags = header[-len(SCORE_FUNCS) :]
    return SCORE_FUNCS[max(range(len(flags)), key=flags.__getitem__)]
