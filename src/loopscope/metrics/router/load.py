"""Load per expert, and its entropy: c_e, f_e = c_e/(kT), H(f)."""

import numpy as np

from loopscope.metrics.context import VisitContext
from loopscope.metrics.family import NOT_APPLICABLE, Family, Floats, FoundColumns, Partials, Slot, SlotTensors


def entropy(weights: Floats) -> Floats:
    """Entropy in nats of non-negative weights normalised to sum 1, [V, n] → [V]; NaN where they sum to 0."""
    total = weights.sum(1, keepdims=True)
    share = weights / np.where(total > 0, total, np.nan)
    # 0·ln 0 = 0; a single expert gives 0, not −0.
    found: Floats = np.abs(np.where(share == 0, 0.0, share * np.log(share)).sum(1))
    return found


def _partial(c: VisitContext) -> SlotTensors:
    return {"count": c.count_E}


def _finish(p: Partials) -> FoundColumns:
    count, num_experts = p["count"], p.num_experts
    h, mean = entropy(count), count.mean(1)
    return {
        "expert_count": count,
        "load_entropy_ratio": h / np.log(num_experts) if num_experts > 1 else NOT_APPLICABLE,
        "effective_experts": np.exp(h),
        "load_kl_uniform": np.maximum(np.log(num_experts) - h, 0.0),
        "load_cv": np.where(mean > 0, count.std(1) / mean, np.nan),
    }


FAMILY: Family[VisitContext] = Family(
    module=__name__,
    sums=(Slot("count", "E"),),
    partial=_partial,
    finish=_finish,
)
