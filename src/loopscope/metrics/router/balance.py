"""The Switch load-balancing loss, E·Σ_e f_e·P_e, from merged loads and as the mean over microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import Family, Metric, Slot
from loopscope.metrics.partials import Partials


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    count_E = c.count_E.double()
    own = c.num_experts * (count_E * c.prob_sum_E).sum() / (count_E.sum() * c.tokens).clamp(min=1.0)
    return {"prob": c.prob_sum_E, "lb_micro": torch.where(c.tokens > 0, own, torch.zeros_like(own))}


def _finish(p: Partials) -> Mapping[str, Any]:
    f = p["count"] / p["count"].sum()
    mean_prob = p["prob"] / p.tokens
    return {
        "mean_prob": mean_prob,
        "lb_loss": p.num_experts * (f * mean_prob).sum(),
        "lb_loss_micro_mean": p.mean("lb_micro", "filled"),
        "filled_microbatches": p.number("filled"),
    }


def _metric(name: str, kind: str, formula: str, needs: tuple[str, ...], merge: str) -> Metric:
    return Metric(
        name=name,
        table="router",
        kind=kind,  # type: ignore[arg-type]
        formula=formula,
        unit="1",
        needs=needs,
        merge=merge,
        source="Fedus et al. 2021, arXiv 2101.03961, eq. 4-6 (transformers' value is k times this)",
        null_rule="non-finite probability: nonfinite; no valid token: absent",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("mean_prob", "list<float32>", "P_e = mean_t p_te", ("router_probs",), "Σp and T"),
        _metric(
            "lb_loss",
            "float64",
            "E·Σ_e f_e·P_e from merged f and P; 1 when balanced",
            ("topk_idx", "router_probs"),
            "from expert_count, mean_prob",
        ),
        _metric(
            "lb_loss_micro_mean",
            "float64",
            "equal-weight mean of each microbatch × rank's own E·Σ_e f_e·P_e",
            ("topk_idx", "router_probs"),
            "Σ lb_loss_micro_mean·filled_microbatches / Σ filled_microbatches",
        ),
        Metric(
            name="filled_microbatches",
            table="router",
            kind="int64",
            formula="microbatches × ranks with a valid token: what lb_loss_micro_mean is a mean over",
            unit="microbatches",
            needs=(),
            merge="sum",
            source="definition",
            null_rule="never; 0 where there is no valid token",
            empty_is_value=True,
        ),
    ),
    sums=(Slot("prob", "E"), Slot("lb_micro")),
    partial=_partial,
    finish=_finish,
)
"""Load-balancing loss."""
