"""The bias that a loss-free balancing router adds to its scores, and how much it changes the choice."""

import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import EMPTY, Family, FoundColumns, Masked, Partials, Slot, SlotTensors, absent

_NO_BIAS = absent("no expert_bias")


def _partial(c: VisitContext) -> SlotTensors:
    bias = c.tensors.expert_bias
    if bias is None:
        zero = torch.zeros_like(c.tokens)
        none = torch.full((c.num_experts,), EMPTY, dtype=torch.float64, device=zero.device)
        return {"bias_tokens": zero, "bias_jaccard": zero, "bias": none}
    # Without selection scores, the logits are the scores before the bias (up to a rising function).
    given = c.tensors.selection_scores is not None
    unbiased_NE = c.scores_NE - bias.to(c.scores_NE.dtype) if given else c.logits_NE
    without_NK = torch.topk(unbiased_NE, c.top_k, dim=-1).indices
    shared_N = (without_NK[:, :, None] == c.raw_idx_NK[:, None, :]).any(-1).sum(-1)
    return {
        "bias_tokens": c.tokens,
        "bias_jaccard": c.total(shared_N / (2 * c.top_k - shared_N)),
        "bias": bias.double(),
    }


def _finish(p: Partials) -> FoundColumns:
    without = p.number("bias_tokens") == 0
    return {
        "expert_bias": Masked(p["bias"], (without, _NO_BIAS)),
        "bias_jaccard": Masked(p.mean("bias_jaccard", "bias_tokens"), (without, _NO_BIAS)),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("bias_tokens"), Slot("bias_jaccard")),
    maxima=(Slot("bias", "E"),),
    partial=_partial,
    finish=_finish,
)
