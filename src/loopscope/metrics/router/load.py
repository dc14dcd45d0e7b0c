"""Load per expert, and its entropy: c_e, f_e = c_e/(kT), H(f)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Metric, Slot
from loopscope.metrics.partials import Partials


def entropy(weights: NDArray[np.float64]) -> float:
    """Entropy in nats of non-negative weights normalised to sum 1; 0·ln 0 = 0. NaN where they sum to 0."""
    total = weights.sum()
    share = weights[weights > 0] / total if total > 0 else np.array([np.nan])
    return float(abs(-(share * np.log(share)).sum()))  # abs: a single expert gives 0, not −0


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    return {"count": c.count_E}


def _finish(p: Partials) -> Mapping[str, Any]:
    count, num_experts = p["count"], p.num_experts
    h = entropy(count)
    mean = count.mean()
    return {
        "expert_count": count,
        "load_entropy_ratio": h / np.log(num_experts) if num_experts > 1 else NOT_APPLICABLE,
        "effective_experts": np.exp(h),
        "load_kl_uniform": max(np.log(num_experts) - h, 0.0) if np.isfinite(h) else h,
        "load_cv": count.std() / mean if mean > 0 else np.nan,
    }


def _metric(name: str, formula: str, unit: str, null_rule: str = "no valid token: absent") -> Metric:
    return Metric(
        name=name,
        table="router",
        kind="float64",
        formula=formula,
        unit=unit,
        needs=("topk_idx",),
        merge="from expert_count",
        source="Shannon 1948; f_e as in Fedus et al. 2021, arXiv 2101.03961",
        null_rule=null_rule,
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        Metric(
            name="expert_count",
            table="router",
            kind="list<int64>",
            formula="c_e = #{t : e in S_t}",
            unit="assignments",
            needs=("topk_idx",),
            merge="sum",
            source="Fedus et al. 2021, arXiv 2101.03961, eq. 5",
            null_rule="never; zeros where there is no valid token",
            empty_is_value=True,
        ),
        _metric("load_entropy_ratio", "H(f)/ln E", "1", "E = 1: not_applicable; no valid token: absent"),
        _metric("effective_experts", "exp(H(f))", "experts"),
        _metric("load_kl_uniform", "ln E − H(f)", "nats"),
        _metric("load_cv", "std(c)/mean(c), ddof 0", "1"),
    ),
    sums=(Slot("count", "E"),),
    partial=_partial,
    finish=_finish,
)
"""Load per expert."""
