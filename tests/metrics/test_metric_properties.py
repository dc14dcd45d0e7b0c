"""What must not change, and what must change exactly so: permutations, microbatches, ranks, dtype of counts."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_inputs import empty_reduced, finish_visit, finished, mask, visit, visits

from loopscope.metrics import reduce_visit, seal_rank, visit_layout

TENSORS = (
    "router_logits",
    "router_probs",
    "topk_idx",
    "topk_weights",
    "residual",
    "selection_scores",
)
PER_EXPERT = ("expert_count", "expert_mass", "mean_prob", "expert_bias")
OF_THE_SPLIT = ("maxvio_micro_mean", "maxvio_rank_max", "lb_loss_micro_mean", "filled_microbatches")


def mapped(v, change):
    given = {name: getattr(v, name) for name in TENSORS}
    return replace(v, **{name: change(tensor) for name, tensor in given.items() if tensor is not None})


def close(a, b, *, skip=()):
    for row_a, row_b in ((a.router, b.router), (a.residual, b.residual)):
        assert set(row_a) == set(row_b)
        for name in set(row_a) - set(skip):
            x, y = row_a[name], row_b[name]
            if x is None or y is None:
                assert x is y, name
            else:
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5, err_msg=name)


@settings(max_examples=40, deadline=None)
@given(visits(), st.integers(0, 2**31))
def test_order_of_tokens_within_a_sequence_does_not_matter(case, seed):
    v, valid = case
    order = torch.randperm(v.residual.shape[1], generator=torch.Generator().manual_seed(seed))
    moved = None if valid is None else valid[:, order]
    close(finished(v, valid), finished(mapped(v, lambda x: x[:, order]), moved))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.data())
def test_renaming_experts_renames_the_lists_and_nothing_else(experts, data):
    k = data.draw(st.integers(1, experts))
    v = visit(experts=experts, k=k, seed=data.draw(st.integers(0, 999)), biased=True)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(experts))
    back = order.argsort()
    renamed = replace(
        v,
        router_logits=v.router_logits[..., order],
        router_probs=v.router_probs[..., order],
        selection_scores=v.selection_scores[..., order],
        expert_bias=v.expert_bias[order],
        topk_idx=back[v.topk_idx],
    )
    a, b = finished(v), finished(renamed)
    close(a, b, skip=PER_EXPERT)
    for name in PER_EXPERT:
        np.testing.assert_allclose(np.array(a.router[name])[order], b.router[name], rtol=1e-6, err_msg=name)


@settings(max_examples=40, deadline=None)
@given(visits(masks=("none", "some")), st.integers(1, 4))
def test_microbatches_merge_to_the_whole_batch(case, copies):
    v, valid = case
    whole = mapped(v, lambda x: x.repeat(copies, 1, 1))
    layout = visit_layout(v.router_logits.shape[-1], v.topk_idx.shape[-1])
    parts = [reduce_visit(v, valid, layout) for _ in range(copies)]
    merged = reduce(lambda a, b: a.merged(b), parts, empty_reduced(layout))
    split = finish_visit(layout, merged.sums.numpy(), merged.maxima.numpy(), score_func=v.score_func)
    once = finished(whole, None if valid is None else valid.repeat(copies, 1))
    close(split, once, skip=(*OF_THE_SPLIT, "dead_expected"))
    assert split.router["expert_count"] == once.router["expert_count"]
    assert split.num_tokens == once.num_tokens


def two_opposite_microbatches():
    logits = torch.tensor([[[9.0, 0.0]] * 4])
    return [visit(experts=2, k=1, logits=x) for x in (logits, logits.flip(-1))]


def test_the_two_lb_losses_of_opposite_microbatches():
    layout = visit_layout(2, 1)
    a, b = (reduce_visit(v, None, layout) for v in two_opposite_microbatches())
    merged = a.merged(b)
    row = finish_visit(layout, merged.sums.numpy(), merged.maxima.numpy()).router
    assert row["lb_loss_micro_mean"] == pytest.approx(2.0, abs=1e-3)
    assert row["lb_loss"] == pytest.approx(1.0, abs=1e-6)
    assert row["maxvio_micro_mean"] == 1
    assert row["maxvio_count"] == 0


def test_a_microbatch_without_a_valid_token_changes_nothing():
    v, empty = visit(seed=1), visit(seed=2)
    layout = visit_layout(8, 2)
    alone = reduce_visit(v, None, layout)
    both = alone.merged(reduce_visit(empty, mask(empty, "all_padding"), layout))
    assert torch.equal(alone.sums, both.sums)
    assert torch.equal(alone.maxima, both.maxima)


def test_each_rank_has_its_own_maxvio_and_the_largest_is_kept():
    layout = visit_layout(2, 1)
    ranks = [seal_rank(layout, reduce_visit(v, None, layout)) for v in two_opposite_microbatches()]
    merged = ranks[0].merged(ranks[1])
    row = finish_visit(layout, merged.sums.numpy(), merged.maxima.numpy()).router
    assert row["maxvio_count"] == 0
    assert row["maxvio_rank_max"] == 1
    one_rank = ranks[0].merged(reduce_visit(two_opposite_microbatches()[1], None, layout))
    assert finish_visit(layout, seal_rank(layout, one_rank).sums.numpy(), one_rank.maxima.numpy()) is not None


def test_a_rank_that_saw_nothing_is_the_identity():
    layout = visit_layout(8, 2)
    seen = seal_rank(layout, reduce_visit(visit(), None, layout))
    merged = seal_rank(layout, empty_reduced(layout)).merged(seen)
    assert torch.equal(merged.sums, seen.sums)
    assert torch.equal(merged.maxima, seen.maxima)


def test_the_same_tensors_give_the_same_bits():
    v = visit(experts=64, k=8, batch=4, seq=128, biased=True)
    layout = visit_layout(64, 8)
    a, b = (reduce_visit(v, None, layout) for _ in range(2))
    assert torch.equal(a.sums, b.sums)
    assert torch.equal(a.maxima, b.maxima)


def test_partial_vectors_share_no_storage_and_carry_no_graph():
    v = visit(biased=True)
    out = reduce_visit(v, None, visit_layout(8, 2))
    theirs = {getattr(v, name).untyped_storage().data_ptr() for name in (*TENSORS, "expert_bias")}
    for tensor in (out.sums, out.maxima):
        assert tensor.dtype == torch.float64
        assert tensor.grad_fn is None
        assert tensor.untyped_storage().data_ptr() not in theirs


def test_a_layout_depends_on_experts_and_k_alone():
    assert visit_layout(8, 2) is visit_layout(8, 2)
    assert visit_layout(8, 2).n_sum == visit_layout(8, 3).n_sum
    assert visit_layout(16, 2).n_sum > visit_layout(8, 2).n_sum


def test_a_bfloat16_sum_is_not_made_in_bfloat16():
    v = visit(experts=4, k=1, batch=4, seq=512, dtype=torch.bfloat16)
    exact = v.residual.double().norm(dim=-1).mean().item()
    assert finished(v).residual["norm_mean"] == pytest.approx(exact, rel=1e-6)
    exact = v.router_probs.double().mean((0, 1)).numpy()
    np.testing.assert_allclose(finished(v).router["mean_prob"], exact, rtol=1e-6)
