"""Distance of a loop state from the loop's input: the last head output, before any injection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loopscope.metrics.context import PairContext
from loopscope.metrics.metric import Family, Metric
from loopscope.metrics.partials import Partials


def _finish(p: Partials) -> Mapping[str, Any]:
    return {"input_distance": p.mean("delta_norm")}


FAMILY: Family[PairContext] = Family(
    metrics=(
        Metric(
            name="input_distance",
            table="transition",
            kind="float64",
            formula="mean_t ‖h_r,t − loop input_t‖",
            unit="activation",
            needs=("residual",),
            merge="sum",
            source="definition",
            null_rule="other kinds than from_input: not_applicable; non-finite residual: nonfinite; "
            "no valid token: absent",
        ),
    ),
    finish=_finish,
)
"""Distance from the loop's input; reads the sums of `delta`."""
