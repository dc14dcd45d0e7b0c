"""Compiled reductions give the eager values, come on request only, and fall back."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_inputs import mask, visit
from torch._dynamo.utils import counters

from loopscope.metrics import (
    PairTensors,
    forget_kernels,
    kernels,
    pair_layout,
    reduce_pair,
    reduce_visit,
    visit_layout,
    warm_up,
    warm_up_like,
)
from loopscope.metrics.dense import leading_scores

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="no C++ compiler; reductions are eager here",
)


@pytest.fixture(autouse=True)
def fresh():
    forget_kernels()
    yield
    forget_kernels()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.data())
def test_passes_of_comparisons_find_what_topk_finds(experts, data):
    k = data.draw(st.integers(1, min(experts, 16)))
    # Few distinct values: ties at every rank; some are -inf.
    values = st.sampled_from([-float("inf"), -2.0, -1.0, 0.0, 0.5, 3.0])
    rows = data.draw(st.lists(st.lists(values, min_size=experts, max_size=experts), min_size=1, max_size=4))
    scores = torch.tensor(rows)
    fast, plain = (leading_scores(scores, k, fusible=f) for f in (True, False))
    for a, b in zip(fast, plain, strict=True):
        assert torch.equal(a, b)


def close(a, b):
    torch.testing.assert_close(a.sums, b.sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.maxima, b.maxima, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_a_masked_visit_with_everything_in_it():
    v = visit(experts=8, k=2, biased=True, seq=33, width=24, dtype=torch.bfloat16)
    valid, layout = mask(v, "some"), visit_layout(8, 2)
    eager = reduce_visit(v, valid, layout)
    before = {name: dict(values) for name, values in counters.items()}
    done = warm_up([(v, valid, layout)])
    assert (done.compiled, done.known, done.failed) == (1, 0, ())
    assert done.seconds > 0
    close(reduce_visit(v, valid, layout), eager)
    # Nothing of torch.compile's own was touched: the model's graphs are counted as without loopscope.
    assert counters["frames"] == before.get("frames", {})
    assert counters["stats"] == before.get("stats", {})
    again = warm_up([(v, valid, layout)])
    assert (again.compiled, again.known) == (0, 1)
    # Other shapes are not compiled on the fly.
    other = visit(experts=8, k=2, seq=5)
    reduce_visit(other, None, layout)
    assert len(kernels._KERNELS) == 1
    # Non-finite values are seen by the kernel too.
    v.router_logits[0, 0, 0] = torch.nan
    v.residual[0, 0, 0] = torch.inf
    close(reduce_visit(v, torch.ones_like(valid), layout), eager_only(v, torch.ones_like(valid), layout))


def eager_only(v, valid, layout):
    saved = dict(kernels._KERNELS)
    forget_kernels()
    reduced = reduce_visit(v, valid, layout)
    kernels._KERNELS.update(saved)
    return reduced


@needs_compiler
def test_transitions_of_one_form_share_a_kernel():
    a, b = visit(seed=1, seq=33), visit(seed=2, seq=33)
    t = PairTensors(a.residual, b.residual)
    layouts = [pair_layout(kind, False, (8, 2), (8, 2)) for kind in ("within_step", "wrap", "entry")]
    eager = reduce_pair(t, None, layouts[0])
    done = warm_up_like(lambda: [reduce_pair(t, None, layout) for layout in layouts])
    assert (done.compiled, done.failed) == (1, ())
    close(reduce_pair(t, None, layouts[2]), eager)


def test_noting_shapes_keeps_no_tensor(monkeypatch):
    import gc
    import weakref

    noted = {}

    def make(recipes):
        noted.update(recipes)
        return kernels.WarmUp(seconds=0.0, compiled=0, known=0, failed=())

    monkeypatch.setattr(kernels, "_make", make)
    v = visit()
    warm_up_like(lambda: reduce_visit(v, None, visit_layout(8, 2)))  # noqa: F821 (deleted after the call)
    assert len(noted) == 1
    alive = weakref.ref(v.residual)
    del v
    gc.collect()
    assert alive() is None


def test_without_a_compiler_the_reason_is_told_and_eager_remains(monkeypatch):
    def broken(self):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(kernels._Recipe, "compiled", broken)
    v, layout = visit(), visit_layout(8, 2)
    done = warm_up([(v, None, layout)])
    assert done.failed == ("visit E=8 k=2: RuntimeError: no compiler",)
    assert done.compiled == 0
    assert reduce_visit(v, None, layout).sums.isfinite().all()


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("experts", "k", "how"),
    [
        (64, 8, {}),
        (1, 1, {}),
        (5, 5, {"score_func": "sigmoid"}),
        (32, 20, {"ties": True}),
        (16, 2, {"scale": 1e4, "biased": True}),
    ],
)
@pytest.mark.parametrize("masked", ["none", "some", "all_padding"])
def test_every_form_of_a_visit(experts, k, how, dtype, masked):
    v = visit(experts=experts, k=k, seq=37, width=40, dtype=dtype, **how)
    valid, layout = mask(v, masked), visit_layout(experts, k)
    eager = reduce_visit(v, valid, layout)
    assert warm_up([(v, valid, layout)]).failed == ()
    compiled = reduce_visit(v, valid, layout)
    torch.testing.assert_close(compiled.sums, eager.sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled.maxima, eager.maxima, rtol=1e-5, atol=1e-5)
