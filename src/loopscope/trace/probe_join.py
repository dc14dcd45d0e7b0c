"""The windows of several forwards over parts of one corpus, joined to the window of one."""

from dataclasses import replace
from typing import Any

import torch

from loopscope.errors import ProbeError
from loopscope.trace.point import TENSOR_FIELDS, TracePoint
from loopscope.trace.sink import TraceWindow

_PER_TOKEN = tuple(name for name in TENSOR_FIELDS if name != "expert_bias")


def join_windows(windows: list[TraceWindow]) -> TraceWindow:
    """One window with every visit's tensors joined along B; empties `windows`.

    A single window is handed on as it is. Otherwise the parts of a visit are released as soon as they are
    joined, so that no more than one visit exists twice.

    Raises:
        ProbeError: the parts do not hold the same visits, or a visit changed its shape between them.
    """
    if len(windows) == 1:
        return windows.pop()
    joined = TraceWindow()
    try:
        for position in sorted(set().union(*windows)):
            joined[position] = _join([_take(window, position) for window in windows])
    except ProbeError:
        joined.clear()
        raise
    for window in windows:
        joined.faults.extend(fault for fault in window.faults if fault not in joined.faults)
    windows.clear()
    return joined


def _take(window: TraceWindow, position: int) -> TracePoint:
    try:
        return window.pop(position)
    except KeyError:
        raise ProbeError(
            f"the visit at unrolled_pos {position} was recorded for some documents of the corpus and not for "
            "others; expected the same visits in every forward. A model that samples its depth must run a "
            "fixed one in eval mode."
        ) from None


def _join(parts: list[TracePoint]) -> TracePoint:
    first = parts[0]
    if any(_identity(part) != _identity(first) for part in parts):
        raise ProbeError(
            f"the visit at unrolled_pos {first.unrolled_pos} changed between the forwards of one probe: "
            f"{sorted({str(_identity(part)) for part in parts})}; expected the same block, loop_step, "
            "layer_idx, E and k for every document."
        )
    given = [name for name in _PER_TOKEN if getattr(first, name) is not None]
    tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in given}
    return replace(first, **tensors)


def _identity(point: TracePoint) -> tuple[object, ...]:
    return (
        point.block,
        point.loop_step,
        point.layer_idx,
        point.num_experts,
        point.top_k,
        point.score_func,
        tuple(point.tensors()),
    )
