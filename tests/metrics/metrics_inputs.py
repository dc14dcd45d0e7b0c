"""Random and adversarial visits for the tests, and the shortest way through reduce and finish."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st

from loopscope.metrics import (
    EMPTY,
    PairTensors,
    Reduced,
    VisitTensors,
    finish_pairs,
    finish_visits,
    pair_layout,
    reduce_pair,
    reduce_visit,
    visit_layout,
)


def visit(
    *,
    experts=8,
    k=2,
    batch=2,
    seq=7,
    width=16,
    seed=0,
    scale=1.0,
    dtype=torch.float32,
    score_func="softmax",
    ties=False,
    biased=False,
    logits=None,
):
    """A visit as a router would make it."""
    g = torch.Generator().manual_seed(seed)
    if logits is None:
        logits = scale * torch.randn(batch, seq, experts, generator=g)
        if ties:
            logits = logits.round()
    logits = logits.to(dtype)
    wide = logits.float()
    scores = wide.softmax(-1) if score_func == "softmax" else wide.sigmoid()
    probs = scores / scores.sum(-1, keepdim=True).clamp(min=1e-30)
    bias = selection = None
    if biased:
        bias = 0.2 * torch.randn(experts, generator=g)
        selection = scores + bias
    idx = (wide if selection is None else selection).topk(k, dim=-1).indices
    chosen = probs.gather(-1, idx)
    weights = chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-30)
    residual = torch.randn(*logits.shape[:2], width, generator=g).to(dtype)
    return VisitTensors(
        logits, probs.to(dtype), idx, weights.to(dtype), residual, score_func, selection, bias
    )


def mask(v, kind, seed=0):
    """None, a random mask with at least one valid token, or all padding."""
    batch, seq = v.residual.shape[:2]
    if kind == "none":
        return None
    if kind == "all_padding":
        return torch.zeros(batch, seq, dtype=torch.bool)
    valid = torch.rand(batch, seq, generator=torch.Generator().manual_seed(seed)) < 0.6
    valid[-1, -1] = True
    return valid


def empty_reduced(layout):
    """The identity of `Reduced.merged`: what a rank or microbatch contributes that saw nothing."""
    return Reduced(
        torch.zeros(layout.n_sum, dtype=torch.float64),
        torch.full((layout.n_max,), EMPTY, dtype=torch.float64),
    )


def _first(columns):
    return {name: values[0] for name, values in columns.values.items()}


def finish_visit(layout, sums, maxima, *, score_func="softmax", **how):
    """One visit's rows: `router`, `router_nulls`, `residual`, `residual_nulls`, `num_tokens`, `faults`."""
    done = finish_visits(layout, sums[None], maxima[None], score_funcs=[score_func], **how)
    return SimpleNamespace(
        router=None if done.router is None else _first(done.router),
        router_nulls={} if done.router is None else done.router.nulls[0],
        residual=_first(done.residual),
        residual_nulls=done.residual.nulls[0],
        num_tokens=done.num_tokens[0],
        faults=tuple(fault for _, fault in done.faults),
    )


def finish_pair(layout, sums, maxima, *, from_count=None, to_count=None):
    """One transition's row: `transition`, `transition_nulls`, `num_tokens`, `faults`."""
    counts = [
        None if count is None else np.asarray(count, dtype=float)[None] for count in (from_count, to_count)
    ]
    done = finish_pairs(layout, sums[None], maxima[None], from_count=counts[0], to_count=counts[1])
    return SimpleNamespace(
        transition=_first(done.transition),
        transition_nulls=done.transition.nulls[0],
        num_tokens=done.num_tokens[0],
        faults=tuple(fault for _, fault in done.faults),
    )


def finished(v, valid=None, **how):
    """Reduce and finish one visit."""
    dense = v.router_logits is None
    layout = visit_layout(0, 0) if dense else visit_layout(v.router_logits.shape[-1], v.topk_idx.shape[-1])
    reduced = reduce_visit(v, valid, layout)
    return finish_visit(layout, reduced.sums.numpy(), reduced.maxima.numpy(), score_func=v.score_func, **how)


def finished_pair(t: PairTensors, valid=None, *, kind, same_layer=False, experts=0, counts=(None, None)):
    """Reduce and finish one transition."""
    sizes = (experts, t.to_topk_idx.shape[-1]) if same_layer else (0, 0)
    layout = pair_layout(kind, same_layer, sizes, sizes)
    reduced = reduce_pair(t, valid, layout)
    return finish_pair(
        layout, reduced.sums.numpy(), reduced.maxima.numpy(), from_count=counts[0], to_count=counts[1]
    )


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@st.composite
def visits(draw, *, masks=("none", "some")):
    """(visit, valid) over E 1..128, k 1..E, one token, ties, ±1e4 logits, all types, sigmoid, selection bias."""
    experts = draw(st.integers(1, 128))
    k = draw(st.integers(1, experts))
    seed = draw(st.integers(0, 2**31))
    biased = draw(st.booleans())
    v = visit(
        experts=experts,
        k=k,
        batch=draw(st.integers(1, 3)),
        seq=draw(st.integers(1, 9)),
        width=draw(st.integers(1, 17)),
        seed=seed,
        # Saturated scores tie, and which of two tied experts a choice without the bias takes is not defined.
        scale=1.0 if biased else draw(st.sampled_from([0.0, 0.01, 1.0, 10.0, 1e4])),
        dtype=draw(DTYPES),
        score_func=draw(st.sampled_from(["softmax", "sigmoid"])),
        ties=False if biased else draw(st.booleans()),
        biased=biased,
    )
    return v, mask(v, draw(st.sampled_from(masks)), seed)
