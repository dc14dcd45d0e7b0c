"""The device phase never reads a value back: run on the meta device, which has no values, and with traps set."""

from __future__ import annotations

import pytest
import torch
from metrics_inputs import mask, visit

from loopscope.metrics import PairTensors, VisitTensors, pair_layout, reduce_pair, reduce_visit, visit_layout

TENSORS = (
    "router_logits",
    "router_probs",
    "topk_idx",
    "topk_weights",
    "residual",
    "score_func",
    "selection_scores",
    "expert_bias",
)


def on_meta(v):
    return VisitTensors(
        *(x.to("meta") if isinstance(x, torch.Tensor) else x for x in (getattr(v, n) for n in TENSORS))
    )


@pytest.mark.parametrize("masked", ["none", "some"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_visit_needs_no_value(masked, biased):
    v = visit(biased=biased)
    valid = mask(v, masked)
    out = reduce_visit(on_meta(v), None if valid is None else valid.to("meta"), visit_layout(8, 2))
    assert out.sums.shape == (visit_layout(8, 2).n_sum,)
    assert out.maxima.shape == (visit_layout(8, 2).n_max,)


@pytest.mark.parametrize("kind", ["within_step", "step_boundary", "from_input"])
def test_a_pair_needs_no_value(kind):
    a, b, before = (on_meta(visit(seed=s)) for s in range(3))
    same = kind == "step_boundary"
    t = PairTensors(
        a.residual,
        b.residual,
        before.residual if same else None,
        a.topk_idx if same else None,
        b.topk_idx if same else None,
    )
    layout = pair_layout(kind, same, (8, 2), (8, 2))
    assert reduce_pair(t, None, layout).sums.shape == (layout.n_sum,)


def test_no_tensor_method_that_waits_is_called(monkeypatch):
    def trap(name):
        def called(*args, **kwargs):
            raise AssertionError(f"Tensor.{name} waits for the device")

        return called

    for name in (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "nonzero",
    ):
        monkeypatch.setattr(torch.Tensor, name, trap(name))
    v = visit(biased=True)
    reduce_visit(v, torch.ones(2, 7, dtype=torch.bool), visit_layout(8, 2))
