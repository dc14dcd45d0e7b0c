"""Size of a block's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import Family, Metric, Slot
from loopscope.metrics.partials import Partials


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    rows = c.rows
    return {
        "norm": c.total(c.norm_N),
        # The mean square per token, so that d need not be known when the sums are finished.
        "mean_square": c.total(rows.square_N / c.tensors.residual.shape[-1]),
        "abs_max": c.highest(rows.abs_max_N),
        "nonfinite_residual": c.total(rows.bad_N),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    return {
        "norm_mean": p.mean("norm"),
        "rms": np.sqrt(p.mean("mean_square")),
        "abs_max": p.number("abs_max"),
        "nonfinite_count": p.number("nonfinite_residual"),
    }


def _metric(name: str, formula: str, merge: str) -> Metric:
    return Metric(
        name=name,
        table="residual",
        kind="float64",
        formula=formula,
        unit="activation",
        needs=("residual",),
        merge=merge,
        source="definition",
        null_rule="non-finite residual: nonfinite; no valid token: absent",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("norm_mean", "mean_t ‖h_t‖₂", "sum"),
        _metric("rms", "sqrt(mean over tokens and d of h²)", "sum"),
        _metric("abs_max", "max |h|", "max"),
        Metric(
            name="nonfinite_count",
            table="residual",
            kind="int64",
            formula="non-finite entries of h",
            unit="entries",
            needs=(),
            merge="sum",
            source="definition",
            null_rule="never; 0 where there is no valid token",
            empty_is_value=True,
        ),
    ),
    sums=(Slot("norm"), Slot("mean_square"), Slot("nonfinite_residual")),
    maxima=(Slot("abs_max"),),
    partial=_partial,
    finish=_finish,
)
"""Norms."""
