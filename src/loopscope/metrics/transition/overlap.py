"""How much of the expert sets two visits of one physical layer share, beside what chance would give."""

from __future__ import annotations

from collections.abc import Mapping
from math import comb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopscope.metrics.context import PairContext
from loopscope.metrics.metric import Family, Metric, Slot, absent
from loopscope.metrics.partials import Partials


def jaccard_chance(num_experts: int, top_k: int) -> float:
    """Expected Jaccard index of two independent uniform k-subsets of E: Σ_m Hypergeom(m)·m/(2k − m).

    >>> round(jaccard_chance(8, 2), 4)
    0.1786
    """
    ways = comb(num_experts, top_k)
    return sum(
        comb(top_k, m) * comb(num_experts - top_k, top_k - m) / ways * (m / (2 * top_k - m))
        for m in range(1, top_k + 1)
    )


def _membership(idx_NK: Tensor, num_experts: int) -> Tensor:
    """[N, E] bool, True for chosen experts. Writes of one constant: the same bits in any order."""
    safe_NK = idx_NK.clamp(0, num_experts - 1)
    chosen = (idx_NK == safe_NK).to(torch.uint8)
    empty = torch.zeros(idx_NK.shape[0], num_experts, dtype=torch.uint8, device=idx_NK.device)
    return empty.scatter_reduce(1, safe_NK, chosen, "amax")


def _partial(c: PairContext) -> Mapping[str, Tensor]:
    a, b = c.tensors.from_topk_idx, c.tensors.to_topk_idx
    if a is None or b is None:
        zero = torch.zeros_like(c.tokens)
        return {"overlap_tokens": zero, "overlap": zero, "jaccard": zero}
    a_NK, b_NK = (x.reshape(-1, x.shape[-1]).long() for x in (a, b))
    if c.top_k**2 <= 4 * c.num_experts:  # whichever intermediate is smaller
        shared_N = (a_NK[:, :, None] == b_NK[:, None, :]).any(-1).sum(-1)
    else:
        shared_N = (_membership(a_NK, c.num_experts) & _membership(b_NK, c.num_experts)).sum(-1)
    return {
        "overlap_tokens": c.tokens,
        "overlap": c.total(shared_N / c.top_k),
        "jaccard": c.total(shared_N / (2 * c.top_k - shared_N)),
    }


def _finish(p: Partials) -> Mapping[str, Any]:
    chance = {
        "overlap_chance": p.top_k / p.num_experts,
        "jaccard_chance": jaccard_chance(p.num_experts, p.top_k),
    }
    if not p.number("overlap_tokens"):
        missing = absent("no chosen experts handed over")
        value: Any = missing if p.tokens > 0 else np.nan
        return {"topk_overlap": value, "topk_jaccard": value, "load_overlap": value, **chance}
    shared = absent("no expert counts handed over")
    if p.counts is not None:
        a, b = (count / count.sum() for count in p.counts)
        load: Any = np.minimum(a, b).sum()
    else:
        load = shared
    return {
        "topk_overlap": p.mean("overlap", "overlap_tokens"),
        "topk_jaccard": p.mean("jaccard", "overlap_tokens"),
        "load_overlap": load,
        **chance,
    }


def _metric(name: str, formula: str, merge: str = "sum", static: bool = False) -> Metric:
    return Metric(
        name=name,
        table="transition",
        kind="float64",
        formula=formula,
        unit="1",
        needs=() if static else ("topk_idx",),
        merge=merge,
        source="definition; chance for two independent uniform k-subsets of E",
        null_rule="visits of different physical layers: not_applicable"
        + ("" if static else "; no valid token: absent"),
        empty_is_value=static,
    )


FAMILY: Family[PairContext] = Family(
    metrics=(
        _metric("topk_overlap", "mean_t |S_a ∩ S_b| / k"),
        _metric("topk_jaccard", "mean_t |S_a ∩ S_b| / |S_a ∪ S_b|"),
        _metric("load_overlap", "Σ_e min(f_a,e, f_b,e)", "from both expert_count"),
        _metric("overlap_chance", "k/E", "constant", static=True),
        _metric("jaccard_chance", "Σ_m Hypergeom(m; E, k, k)·m/(2k − m)", "constant", static=True),
    ),
    sums=(Slot("overlap_tokens"), Slot("overlap"), Slot("jaccard")),
    partial=_partial,
    finish=_finish,
)
"""Overlap of expert sets."""
