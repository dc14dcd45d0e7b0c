"""`reduce_trace`: one forward's rows as plain dictionaries, by the very path the collector uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopscope.collect.accumulate import StepAccumulator
from loopscope.collect.context import RowDict
from loopscope.collect.rows import broken_values, step_rows
from loopscope.errors import TraceError
from loopscope.trace import TraceMeta, TraceSink

if TYPE_CHECKING:
    from jaxtyping import Bool
    from torch import Tensor


def reduce_trace(
    sink: TraceSink, meta: TraceMeta, *, valid: Bool[Tensor, "B S"] | None = None
) -> dict[str, list[RowDict]]:
    """Reduce one forward's trace to rows, without writing them.

    Args:
        sink: `unrolled_pos` → TracePoint, as `ACTIVE_TRACE_SINK.disarm()` gives it.
        meta: what the model says of this forward.
        valid: [B, S] bool, True for non-padding input tokens; None when every token counts.

    Returns:
        ``{"router": [...], "residual": [...], "transition": [...]}``, rows in order of depth, columns as in
        the stored tables but without the run-level keys (`run_id`, `step`, ...). A dense visit has no router
        row.

    Raises:
        MetricInputError: shapes, types, E or k do not fit; probabilities were handed in as logits; an index
            lies outside [0, E).
        TraceError: `meta` breaks the contract, or the window recorded a position twice.
    """
    meta.check()
    if faults := getattr(sink, "faults", ()):
        raise TraceError(
            f"the window is invalid: {'; '.join(faults)}. Expected one record per unrolled_pos; open a new "
            "window for every forward."
        )
    accumulator = StepAccumulator()
    accumulator.add(sink, valid)
    rows = step_rows(accumulator.finish())
    for error in broken_values(rows):
        raise error
    return rows.tables
