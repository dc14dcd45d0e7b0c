"""Every metric loopscope computes. Adding one: a file with a `FAMILY`, a line here and a mirrored test."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from loopscope.metrics import loss, tokens
from loopscope.metrics.metric import Family, Metric
from loopscope.metrics.residual import correlation, norm
from loopscope.metrics.router import (
    balance,
    bias,
    concentration,
    dead,
    entropy,
    gap,
    guards,
    load,
    logits,
    margin,
    mass,
    violation,
    z,
)
from loopscope.metrics.transition import delta, input_distance, overlap, update

ROUTER = (
    load.FAMILY,
    mass.FAMILY,
    violation.FAMILY,
    dead.FAMILY,
    balance.FAMILY,
    entropy.FAMILY,
    concentration.FAMILY,
    margin.FAMILY,
    gap.FAMILY,
    z.FAMILY,
    logits.FAMILY,
    bias.FAMILY,
    guards.FAMILY,
)
RESIDUAL = (norm.FAMILY, correlation.FAMILY)
TRANSITION = (delta.FAMILY, update.FAMILY, input_distance.FAMILY, overlap.FAMILY)

REGISTRY: Mapping[tuple[str, str], Metric] = MappingProxyType(
    {
        (metric.table, metric.name): metric
        for group in (
            loss.METRICS,
            *(family.metrics for family in (*ROUTER, *RESIDUAL, *TRANSITION)),
        )
        for metric in group
    }
)
"""(table, column) → metric, in the order of the columns."""


@cache
def visit_families(num_experts: int) -> tuple[Family[Any], ...]:
    """Families of a visit with E experts (0: dense), in the order of its partial vectors."""
    return (tokens.VISIT, *(ROUTER if num_experts else ()), *RESIDUAL)


@cache
def pair_families(kind: str, same_layer: bool, num_experts: int) -> tuple[Family[Any], ...]:
    """Families of a transition, in the order of its partial vectors."""
    chosen: list[Family[Any]] = [tokens.PAIR, delta.FAMILY]
    if kind == "step_boundary":
        chosen.append(update.FAMILY)
    if kind == "from_input":
        chosen.append(input_distance.FAMILY)
    if same_layer and num_experts:
        chosen.append(overlap.FAMILY)
    return tuple(chosen)
