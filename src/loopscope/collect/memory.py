"""How much memory recording one forward holds until its callback, from the configuration alone."""

from collections.abc import Iterable

from loopscope.trace import VisitSpec

_PER_EXPERT = 8  # logits and probabilities, float32
_PER_CHOICE = 12  # index (int64) and weight (float32)


def planned_trace_bytes(
    visits: Iterable[VisitSpec], *, batch: int, sequence: int, width: int, residual_bytes: int
) -> int:
    """Bytes of one microbatch's trace: Σ over visits of B·S·(8E + 12k + d·bytes).

    Args:
        visits: the promised visits, at the largest R.
        batch: B of one microbatch on one rank.
        sequence: S.
        width: d, width of the residual.
        residual_bytes: bytes per entry of the residual (4 for float32, 2 for bfloat16).

    Eager training without recompute keeps these tensors until backward anyway, so a trace adds nothing. Under full
    recompute autograd keeps the residuals alone, and a trace adds the router's part, 8E + 12k per token and visit.

    >>> from loopscope.trace import VisitSpec
    >>> visit = VisitSpec(block="loop", unrolled_pos=0, loop_step=0, layer_idx=0, num_experts=64, top_k=8)
    >>> planned_trace_bytes([visit], batch=2, sequence=256, width=512, residual_bytes=4)
    1359872
    """
    per_token = sum(
        _PER_EXPERT * visit.num_experts + _PER_CHOICE * visit.top_k + width * residual_bytes
        for visit in visits
    )
    return batch * sequence * per_token
