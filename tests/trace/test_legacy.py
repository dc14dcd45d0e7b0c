import importlib.util
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trace_helpers import D, E, K, S, make_point, router

import loopscope.trace
from loopscope.trace import TracePoint, legacy_trace_point_factory

OLD_MODEL = """
import torch
from loopscope.trace import ACTIVE_TRACE_SINK, TracePoint

def forward(x, gate, loops, layers):
    for loop_step in range(loops):
        for layer_idx in range(layers):
            logits = x @ gate
            probs = logits.softmax(-1)
            top, idx = probs.topk(2)
            x = x + x.tanh()
            ACTIVE_TRACE_SINK.record(TracePoint(
                loop_step=loop_step, layer_idx=layer_idx, router_logits=logits, router_probs=probs,
                topk_idx=idx, topk_weights=top / top.sum(-1, keepdim=True), residual=x))
    return x
"""


def old_fields(**changes):
    logits, probs, idx, weights = router()
    fields = {
        "loop_step": 1,
        "layer_idx": 2,
        "router_logits": logits,
        "router_probs": probs,
        "topk_idx": idx,
        "topk_weights": weights,
        "residual": torch.randn(4, S, D),
    }
    return {**fields, **changes}


@given(st.integers(1, 6), st.integers(0, 9), st.data())
def test_fills_what_the_old_class_did_not_have(layers, step, data):
    layer = data.draw(st.integers(0, layers - 1))
    point = legacy_trace_point_factory(layers)(**old_fields(loop_step=step, layer_idx=layer))
    assert isinstance(point, TracePoint)
    assert (point.block, point.unrolled_pos) == ("loop", step * layers + layer)
    assert (point.num_experts, point.top_k) == (E, K)


def test_an_old_module_builds_points_with_the_factory_under_the_classs_name(tmp_path, monkeypatch):
    (tmp_path / "old_bundle.py").write_text(OLD_MODEL)
    monkeypatch.setattr(loopscope.trace, "TracePoint", legacy_trace_point_factory(2))
    spec = importlib.util.spec_from_file_location("old_bundle", tmp_path / "old_bundle.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "old_bundle", module)
    spec.loader.exec_module(module)
    sink = loopscope.trace.ACTIVE_TRACE_SINK
    sink.arm()
    module.forward(torch.randn(1, 3, D), torch.randn(D, 7), loops=3, layers=2)
    points = sink.disarm(on_error="raise")
    assert sorted(points) == list(range(6))
    assert {point.num_experts for point in points.values()} == {7}
    assert all(type(point) is TracePoint for point in points.values())
    assert isinstance(points[0], loopscope.trace.TracePoint)  # the stand-in answers for the class


def test_a_second_factory_made_while_one_is_installed_still_binds_the_class(monkeypatch):
    monkeypatch.setattr(loopscope.trace, "TracePoint", legacy_trace_point_factory(2))
    assert type(legacy_trace_point_factory(4)(**old_fields())) is TracePoint


@pytest.mark.parametrize("name", ["loop_step", "layer_idx", "router_logits", "topk_idx", "residual"])
@pytest.mark.parametrize("how", ["left out", "None"])
def test_names_what_is_missing(name, how):
    fields = old_fields()
    if how == "None":
        fields[name] = None
    else:
        del fields[name]
    with pytest.raises(ValueError, match=f"lacks {name};"):
        legacy_trace_point_factory(4)(**fields)


def test_names_all_that_is_missing():
    with pytest.raises(ValueError, match="lacks loop_step, layer_idx, router_logits, router_probs"):
        legacy_trace_point_factory(4)()


def test_refuses_unknown_keywords_and_indices_out_of_range():
    with pytest.raises(ValueError, match="got depth"):
        legacy_trace_point_factory(4)(**old_fields(depth=3))
    with pytest.raises(ValueError, match="layer_idx is 2"):
        legacy_trace_point_factory(2)(**old_fields())
    with pytest.raises(ValueError, match="num_layers_in_stack is 0"):
        legacy_trace_point_factory(0)


def test_a_dense_old_layer_has_no_experts():
    dense = dict.fromkeys(("router_logits", "router_probs", "topk_idx", "topk_weights"))
    point = legacy_trace_point_factory(4)(**old_fields(**dense))
    assert (point.num_experts, point.top_k, point.is_dense) == (0, 0, True)


def test_new_code_passes_through():
    point = make_point(5)
    values = {name: getattr(point, name) for name in TracePoint.__slots__ if name != "__weakref__"}
    assert legacy_trace_point_factory(4)(**values).unrolled_pos == 5
