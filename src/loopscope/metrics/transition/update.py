"""How successive updates of a loop relate: D_r = h_r − h_{r−1} at one layer against D_{r−1}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopscope.metrics.context import PairContext
from loopscope.metrics.dense import bad_entries, widen
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Metric, Slot
from loopscope.metrics.partials import Partials
from loopscope.metrics.ratio import TINY, safe_ratio

_SLOTS = (
    "update_tokens",
    "update_cosine",
    "update_excluded",
    "acceleration",
    "update_norm",
    "earlier_update_norm",
    "nonfinite_before_residual",
)
_COLUMNS = ("update_cosine", "update_cosine_excluded", "acceleration", "contraction")


def _partial(c: PairContext) -> Mapping[str, Tensor]:
    before = c.tensors.before_residual
    if before is None:
        return dict.fromkeys(_SLOTS, torch.zeros_like(c.tokens))
    before_ND = widen(before)
    earlier_ND = c.from_ND - before_ND
    earlier_norm_N = earlier_ND.square().sum(-1).sqrt()
    cosine_N, excluded_N = safe_ratio((c.delta_ND * earlier_ND).sum(-1), c.delta_norm_N * earlier_norm_N)
    return {
        "update_tokens": c.tokens,
        "update_cosine": c.total(cosine_N),
        "update_excluded": c.total(excluded_N.float()),
        "acceleration": c.total((c.delta_ND - earlier_ND).square().sum(-1).sqrt()),
        "update_norm": c.total(c.delta_norm_N),
        "earlier_update_norm": c.total(earlier_norm_N),
        "nonfinite_before_residual": c.total(bad_entries(before_ND, fusible=c.fusible)),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    if not p.number("update_tokens"):
        return dict.fromkeys(_COLUMNS, NOT_APPLICABLE)
    earlier = p.number("earlier_update_norm")
    return {
        "update_cosine": p.mean_without("update_cosine", "update_excluded", "update_tokens"),
        "update_cosine_excluded": p.number("update_excluded"),
        "acceleration": p.mean("acceleration", "update_tokens"),
        "contraction": NOT_APPLICABLE if earlier < TINY else p.number("update_norm") / earlier,
    }


def _metric(name: str, formula: str, merge: str, unit: str = "1", kind: str = "float64") -> Metric:
    return Metric(
        name=name,
        table="transition",
        kind=kind,  # type: ignore[arg-type]
        formula=formula,
        unit=unit,
        needs=("residual", "before_residual"),
        merge=merge,
        source="definition, D_r = h_r − h_{r−1} at one physical layer",
        null_rule="other kinds than step_boundary, the first step_boundary, every denominator below 1e-12: "
        "not_applicable; non-finite residual: nonfinite",
    )


FAMILY: Family[PairContext] = Family(
    metrics=(
        _metric("update_cosine", "mean_t cos(D_r,t, D_{r−1},t)", "sum"),
        _metric("update_cosine_excluded", "#{t : ‖D_r,t‖·‖D_{r−1},t‖ < 1e-12}", "sum", "tokens", "int64"),
        _metric("acceleration", "mean_t ‖D_r,t − D_{r−1},t‖", "sum", "activation"),
        _metric(
            "contraction",
            "Σ_t ‖D_r,t‖ / Σ_t ‖D_{r−1},t‖",
            "delta_norm_mean·T of this row and of the boundary before it",
        ),
    ),
    sums=tuple(Slot(name) for name in _SLOTS),
    partial=_partial,
    finish=_finish,
)
"""Successive updates."""
