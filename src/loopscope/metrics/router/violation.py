"""How far the most loaded, the least loaded and the average expert are from balance: u_e = E·f_e."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import Family, Metric, Slot
from loopscope.metrics.partials import EMPTY, Partials


def relative_load(load: NDArray[np.float64]) -> NDArray[np.float64]:
    """u = load over its mean, [E]; NaN where nothing was loaded."""
    mean = load.mean()
    return load / mean if mean > 0 else np.full_like(load, np.nan)


def max_violation(load: NDArray[np.float64]) -> float:
    """max u − 1."""
    return float(relative_load(load).max() - 1)


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    count_E = c.count_E.double()
    violation = c.num_experts * count_E.max() / count_E.sum().clamp(min=1.0) - 1.0
    return {
        "maxvio_tokens": violation * c.tokens,
        # A rank's own value exists once its microbatches are merged; see reduce.seal_rank.
        "maxvio_rank": torch.full_like(violation, EMPTY),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    u = relative_load(p["count"])
    over_ranks = p.number("maxvio_rank")
    return {
        "maxvio_count": u.max() - 1,
        "minvio_count": u.min() - 1,
        "avgvio_count": np.abs(u - 1).mean(),
        "maxvio_micro_mean": p.mean("maxvio_tokens"),
        "maxvio_rank_max": over_ranks if np.isfinite(over_ranks) else u.max() - 1,
    }


def _metric(name: str, formula: str, merge: str = "from expert_count") -> Metric:
    return Metric(
        name=name,
        table="router",
        kind="float64",
        formula=formula,
        unit="1",
        needs=("topk_idx",),
        merge=merge,
        source="MaxVio of Wang et al. 2024, arXiv 2408.15664",
        null_rule="no valid token: absent",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("maxvio_count", "max_e u_e − 1"),
        _metric("minvio_count", "min_e u_e − 1"),
        _metric("avgvio_count", "mean_e |u_e − 1|"),
        _metric("maxvio_micro_mean", "token-weighted mean of max u − 1 over microbatch × rank", "sum"),
        _metric("maxvio_rank_max", "the largest rank's max u − 1", "max"),
    ),
    sums=(Slot("maxvio_tokens"),),
    maxima=(Slot("maxvio_rank"),),
    partial=_partial,
    finish=_finish,
)
"""Violations of balance."""
