"""Experts without a token, beside how many a balanced router would leave without one by chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import NOT_APPLICABLE, Family, Metric
from loopscope.metrics.partials import Partials


def _finish(p: Partials) -> Mapping[str, Any]:
    num_experts, top_k = p.num_experts, p.top_k
    return {
        "dead_experts": np.count_nonzero(p["count"] == 0),
        "dead_expected": num_experts * (1 - top_k / num_experts) ** p.tokens,
        "dropped_assignments": NOT_APPLICABLE,
    }


FAMILY: Family[VisitContext] = Family(
    metrics=(
        Metric(
            name="dead_experts",
            table="router",
            kind="int64",
            formula="#{e : c_e = 0}",
            unit="experts",
            needs=("topk_idx",),
            merge="from expert_count",
            source="Fedus et al. 2021, arXiv 2101.03961",
            null_rule="no valid token: absent",
        ),
        Metric(
            name="dead_expected",
            table="router",
            kind="float64",
            formula="E·(1 − k/E)^T",
            unit="experts",
            needs=(),
            merge="from num_tokens",
            source="expected number of empty experts when every token draws k of E uniformly",
            null_rule="no valid token: absent",
        ),
        Metric(
            name="dropped_assignments",
            table="router",
            kind="int64",
            formula="assignments that found no capacity",
            unit="assignments",
            needs=("topk_idx",),
            merge="sum",
            source="Fedus et al. 2021, arXiv 2101.03961",
            null_rule="not_applicable where the router drops nothing",
        ),
    ),
    finish=_finish,
)
"""Dead experts."""
