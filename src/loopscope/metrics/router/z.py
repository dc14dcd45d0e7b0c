"""The router's z_t = logsumexp of the logits, and with it the router z-loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Metric, Slot
from loopscope.metrics.partials import Partials

_COLUMNS = ("z_mean", "z_std", "z_min", "z_max", "z_sq_mean", "z_frac_negative")


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    # logsumexp, around the maximum that other metrics need as well.
    around_N = torch.nan_to_num(c.logit_max_N)
    z_N = around_N + (c.logits_NE - around_N[:, None]).exp().sum(-1).log()
    return {
        "z": c.total(z_N),
        # Squared in float64: the variance comes from the difference of two merged sums.
        "z_sq": c.keep(z_N).double().square().sum(),
        "z_negative": c.total((z_N < 0).float()),
        "z_max": c.highest(z_N),
        "z_neg_min": c.highest(-z_N),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    if p.score_func != "softmax":
        return dict.fromkeys(_COLUMNS, NOT_APPLICABLE)
    mean, square = p.mean("z"), p.mean("z_sq")
    return {
        "z_mean": mean,
        "z_std": np.sqrt(np.maximum(square - mean**2, 0.0)),
        "z_min": -p.number("z_neg_min"),
        "z_max": p.number("z_max"),
        "z_sq_mean": square,
        "z_frac_negative": p.mean("z_negative"),
    }


def _metric(name: str, formula: str, merge: str, unit: str = "nats") -> Metric:
    return Metric(
        name=name,
        table="router",
        kind="float64",
        formula=formula,
        unit=unit,
        needs=("router_logits",),
        merge=merge,
        source="router z-loss of Zoph et al. 2022, arXiv 2202.08906, eq. 5",
        null_rule="sigmoid router: not_applicable; non-finite logit: nonfinite; no valid token: absent",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("z_mean", "mean_t z_t, z_t = logsumexp_e logits", "sum"),
        _metric("z_std", "std_t z_t, ddof 0", "sums of z and z² in float64"),
        _metric("z_min", "min_t z_t", "max of negative"),
        _metric("z_max", "max_t z_t", "max"),
        _metric("z_sq_mean", "mean_t z_t²: the visit's z-loss", "sum", "nats²"),
        _metric(
            "z_frac_negative",
            "share of tokens with z_t < 0, where the z-loss sharpens the router",
            "sum",
            "1",
        ),
    ),
    sums=(Slot("z"), Slot("z_sq"), Slot("z_negative")),
    maxima=(Slot("z_max"), Slot("z_neg_min")),
    partial=_partial,
    finish=_finish,
)
"""Log-partition of the router."""
