"""The bias that a loss-free balancing router adds to its scores, and how much it changes the choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopscope.metrics.context import VisitContext
from loopscope.metrics.metric import Family, Metric, Slot, absent
from loopscope.metrics.partials import EMPTY, Partials

_NO_BIAS = absent("no expert_bias")


def _partial(c: VisitContext) -> Mapping[str, Tensor]:
    bias = c.tensors.expert_bias
    if bias is None:
        zero = torch.zeros_like(c.tokens)
        none = torch.full((c.num_experts,), EMPTY, dtype=torch.float64, device=zero.device)
        return {"bias_tokens": zero, "bias_jaccard": zero, "bias": none}
    # Without selection scores, the logits are the scores before the bias (up to a rising function).
    given = c.tensors.selection_scores is not None
    unbiased_NE = c.scores_NE - bias.to(c.scores_NE.dtype) if given else c.logits_NE
    without_NK = torch.topk(unbiased_NE, c.top_k, dim=-1).indices
    shared_N = (without_NK[:, :, None] == c.raw_idx_NK[:, None, :]).any(-1).sum(-1)
    return {
        "bias_tokens": c.tokens,
        "bias_jaccard": c.total(shared_N / (2 * c.top_k - shared_N)),
        "bias": bias.double(),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    if not p.number("bias_tokens"):
        return {"expert_bias": _NO_BIAS, "bias_jaccard": _NO_BIAS}
    return {"expert_bias": p["bias"], "bias_jaccard": p.mean("bias_jaccard", "bias_tokens")}


def _metric(name: str, kind: str, formula: str, unit: str, needs: tuple[str, ...], merge: str) -> Metric:
    return Metric(
        name=name,
        table="router",
        kind=kind,  # type: ignore[arg-type]
        formula=formula,
        unit=unit,
        needs=needs,
        merge=merge,
        source="loss-free balancing of Wang et al. 2024, arXiv 2408.15664",
        null_rule="no bias or no valid token: absent; non-finite bias or score: nonfinite",
    )


FAMILY: Family[VisitContext] = Family(
    metrics=(
        _metric("expert_bias", "list<float32>", "the bias b_e", "score", (), "last (equal within a step)"),
        _metric(
            "bias_jaccard",
            "float64",
            "mean_t |S_t ∩ S'_t| / |S_t ∪ S'_t|, S' the choice without the bias",
            "1",
            ("choice_scores", "topk_idx"),
            "sum",
        ),
    ),
    sums=(Slot("bias_tokens"), Slot("bias_jaccard")),
    maxima=(Slot("bias", "E"),),
    partial=_partial,
    finish=_finish,
)
"""Expert bias."""
