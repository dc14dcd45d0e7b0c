"""How undecided the router is about each token: H(p_t), and what the expert tells about the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Metric, Slot
from loopscope.metrics.partials import Partials


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    p_NE = c.probs_NE
    # 0·ln 0 = 0; below the smallest normal number p·ln p is nothing.
    log_NE = p_NE.clamp(min=torch.finfo(p_NE.dtype).tiny).log()
    return {"entropy": c.total(-(p_NE * log_NE).sum(-1))}


def _finish(p: Partials) -> Mapping[str, Any]:
    mean = p.mean("entropy")
    mean_prob = p["prob"] / p.tokens
    # Not normalised again: probabilities rounded to a half type sum to 1 only nearly, in both terms alike.
    marginal = -np.where(mean_prob == 0, 0.0, mean_prob * np.log(mean_prob)).sum()
    return {
        "token_entropy_mean": mean,
        "token_entropy_ratio": mean / np.log(p.num_experts) if p.num_experts > 1 else NOT_APPLICABLE,
        "mutual_information": marginal - mean,
    }


def _metric(name: str, formula: str, unit: str, merge: str, null_rule: str = "") -> Metric:
    return Metric(
        name=name,
        table="router",
        kind="float64",
        formula=formula,
        unit=unit,
        needs=("router_probs",),
        merge=merge,
        source="Shannon 1948",
        null_rule=null_rule + "non-finite probability: nonfinite; no valid token: absent",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("token_entropy_mean", "mean_t H(p_t)", "nats", "sum"),
        _metric("token_entropy_ratio", "mean_t H(p_t) / ln E", "1", "sum", "E = 1: not_applicable; "),
        _metric("mutual_information", "H(P) − mean_t H(p_t)", "nats", "from mean_prob, token_entropy_mean"),
    ),
    sums=(Slot("entropy"),),
    partial=_partial,
    finish=_finish,
)
"""Token entropy."""
