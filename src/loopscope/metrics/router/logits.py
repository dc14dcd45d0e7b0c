"""Size of the logits, and how many router entries are not finite."""

import numpy as np
import torch

from loopscope.metrics.context import VisitContext
from loopscope.metrics.dense import bad_entries
from loopscope.metrics.family import Family, FoundColumns, Partials, Slot, SlotTensors


def _partial(c: VisitContext) -> SlotTensors:
    bad_logits_N = bad_entries(c.logits_NE, fusible=c.fusible)
    bad_probs_N = bad_entries(c.probs_NE, fusible=c.fusible)
    bad_weights_N = bad_entries(c.weights_NK, fusible=c.fusible)
    given = c.tensors.selection_scores is not None
    bad_scores_N = bad_entries(c.scores_NE, fusible=c.fusible) if given else bad_logits_N
    derived_N = bad_probs_N + bad_weights_N + (bad_scores_N if given else torch.zeros_like(bad_scores_N))
    return {
        "logit_sq": c.total(c.logits_NE.square().mean(-1)),
        "logit_abs_max": c.highest(torch.maximum(c.logit_max_N, -c.logit_min_N)),
        "nonfinite_router_logits": c.total(bad_logits_N),
        "nonfinite_router_probs": c.total(bad_probs_N),
        "nonfinite_topk_weights": c.total(bad_weights_N),
        "nonfinite_choice_scores": c.total(bad_scores_N),
        # What a token's non-finite logit makes of its probabilities and weights is not a fault of its own.
        "nonfinite_entries": c.total(torch.where(bad_logits_N > 0, bad_logits_N, derived_N)),
    }


def _finish(p: Partials) -> FoundColumns:
    return {
        "logit_rms": np.sqrt(p.mean("logit_sq")),
        "logit_abs_max": p.number("logit_abs_max"),
        "nonfinite_count": p.number("nonfinite_entries"),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(
        Slot("logit_sq"),
        Slot("nonfinite_router_logits"),
        Slot("nonfinite_router_probs"),
        Slot("nonfinite_topk_weights"),
        Slot("nonfinite_choice_scores"),
        Slot("nonfinite_entries"),
    ),
    maxima=(Slot("logit_abs_max"),),
    partial=_partial,
    finish=_finish,
)
