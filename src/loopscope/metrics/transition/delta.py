"""How far a block output moves: ‖D‖, relative to where it was, and in which direction. D = h_to − h_from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from loopscope.metrics.context import PairContext
from loopscope.metrics.dense import bad_entries
from loopscope.metrics.metric import Family, Metric, Slot
from loopscope.metrics.partials import Partials
from loopscope.metrics.ratio import safe_ratio


def _partial(c: PairContext) -> Mapping[str, Tensor]:
    relative_N, excluded_N = safe_ratio(c.delta_norm_N, c.from_norm_N)
    growth_N, _ = safe_ratio(c.to_norm_N, c.from_norm_N)
    cosine_N, no_cosine_N = safe_ratio((c.from_ND * c.to_ND).sum(-1), c.from_norm_N * c.to_norm_N)
    return {
        "delta_norm": c.total(c.delta_norm_N),
        "relative_delta": c.total(relative_N),
        "growth": c.total(growth_N),
        "ratio_excluded": c.total(excluded_N.float()),
        "state_cosine": c.total(cosine_N),
        "cosine_excluded": c.total(no_cosine_N.float()),
        "nonfinite_residual": c.total(
            bad_entries(c.from_ND, fusible=c.fusible) + bad_entries(c.to_ND, fusible=c.fusible)
        ),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    excluded, no_cosine = p.number("ratio_excluded"), p.number("cosine_excluded")
    return {
        "delta_norm_mean": p.mean("delta_norm"),
        "relative_delta": p.mean_without("relative_delta", "ratio_excluded"),
        "relative_delta_excluded": excluded,
        "growth": p.mean_without("growth", "ratio_excluded"),
        "growth_excluded": excluded,
        "state_cosine": p.mean_without("state_cosine", "cosine_excluded"),
        "state_cosine_excluded": no_cosine,
        "nonfinite_count": p.number("nonfinite_residual"),
    }


def _metric(name: str, formula: str, unit: str = "1") -> Metric:
    return Metric(
        name=name,
        table="transition",
        kind="float64",
        formula=formula,
        unit=unit,
        needs=("residual",),
        merge="sum",
        source="definition",
        null_rule="non-finite residual: nonfinite; no valid token: absent; all excluded: not_applicable",
    )


def _excluded(name: str, formula: str) -> Metric:
    return Metric(
        name=name,
        table="transition",
        kind="int64",
        formula=formula,
        unit="tokens",
        needs=("residual",),
        merge="sum",
        source="definition",
        null_rule="non-finite residual: nonfinite",
        empty_is_value=True,
    )


FAMILY: Family[PairContext] = Family(
    metrics=(
        _metric("delta_norm_mean", "mean_t ‖D_t‖", "activation"),
        _metric("relative_delta", "mean_t ‖D_t‖/‖h_from,t‖"),
        _excluded("relative_delta_excluded", "#{t : ‖h_from,t‖ < 1e-12}"),
        _metric("growth", "mean_t ‖h_to,t‖/‖h_from,t‖"),
        _excluded("growth_excluded", "#{t : ‖h_from,t‖ < 1e-12}"),
        _metric("state_cosine", "mean_t cos(h_from,t, h_to,t)"),
        _excluded("state_cosine_excluded", "#{t : ‖h_from,t‖·‖h_to,t‖ < 1e-12}"),
        Metric(
            name="nonfinite_count",
            table="transition",
            kind="int64",
            formula="non-finite entries of h_from and h_to",
            unit="entries",
            needs=(),
            merge="sum",
            source="definition",
            null_rule="never; 0 where there is no valid token",
            empty_is_value=True,
        ),
    ),
    sums=tuple(
        Slot(name)
        for name in (
            "delta_norm",
            "relative_delta",
            "growth",
            "ratio_excluded",
            "state_cosine",
            "cosine_excluded",
            "nonfinite_residual",
        )
    ),
    partial=_partial,
    finish=_finish,
)
"""Movement between two visits."""
