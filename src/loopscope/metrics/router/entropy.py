"""How undecided the router is about each token: H(p_t), and what the expert tells about the token."""

import numpy as np
import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, FoundColumns, Partials, Slot, SlotTensors


def _partial(c: VisitContext) -> SlotTensors:
    p_NE = c.probs_NE
    # 0·ln 0 = 0; below the smallest normal number p·ln p is nothing.
    log_NE = p_NE.clamp(min=torch.finfo(p_NE.dtype).tiny).log()
    return {"entropy": c.total(-(p_NE * log_NE).sum(-1))}


def _finish(p: Partials) -> FoundColumns:
    mean = p.mean("entropy")
    mean_prob = p["prob"] / p.tokens[:, None]
    # Not normalised again: probabilities rounded to a half type sum to 1 only nearly, in both terms alike.
    marginal = -np.where(mean_prob == 0, 0.0, mean_prob * np.log(mean_prob)).sum(1)
    return {
        "token_entropy_mean": mean,
        "token_entropy_ratio": mean / np.log(p.num_experts) if p.num_experts > 1 else NOT_APPLICABLE,
        "mutual_information": marginal - mean,
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("entropy"),),
    partial=_partial,
    finish=_finish,
)
