import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_helpers import META, make_point

from loopscope.trace import (
    ACCEPTED_LOOP_AXIS_PROVENANCES,
    LossComponents,
    TraceMeta,
    TracePoint,
    VisitSpec,
    unrolled_position,
)
from loopscope.trace.point import TraceError


@given(st.integers(1, 50), st.integers(0, 200), st.data())
def test_unrolled_position_counts_visits_in_execution_order(layers, step, data):
    layer = data.draw(st.integers(0, layers - 1))
    executed_before = [(r, i) for r in range(step) for i in range(layers)] + [(step, i) for i in range(layer)]
    assert unrolled_position(step, layer, layers) == len(executed_before)


@pytest.mark.parametrize(
    ("step", "layer", "layers", "names"),
    [
        (0, 0, 0, "num_layers_in_stack is 0"),
        (-1, 0, 2, "loop_step is -1"),
        (0, 2, 2, "layer_idx is 2"),
        (0, -1, 2, "layer_idx is -1"),
    ],
)
def test_unrolled_position_refuses(step, layer, layers, names):
    with pytest.raises(ValueError, match=names):
        unrolled_position(step, layer, layers)


@pytest.mark.parametrize("field", ["num_experts", "top_k", "residual", "block", "unrolled_pos"])
def test_a_point_has_no_default_for(field):
    point = make_point()
    values = {f.name: getattr(point, f.name) for f in dataclasses.fields(point)}
    del values[field]
    with pytest.raises(TypeError, match=field):
        TracePoint(**values)


def test_points_are_frozen_and_keyword_only():
    point = make_point()
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.top_k = 3
    with pytest.raises(TypeError):
        LossComponents(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    with pytest.raises(TypeError):
        VisitSpec(0, "loop", 0, 0, 4, 2)


def test_dense_points_name_their_tensors():
    dense = make_point(
        router_logits=None, router_probs=None, topk_idx=None, topk_weights=None, num_experts=0, top_k=0
    )
    assert dense.is_dense
    assert list(dense.tensors()) == ["residual"]
    assert not make_point().is_dense


@pytest.mark.parametrize("spelling", ACCEPTED_LOOP_AXIS_PROVENANCES)
def test_both_accepted_provenances_pass(spelling):
    dataclasses.replace(META, loop_axis_provenance=spelling).check()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"loop_axis_provenance": "reshaped"}, "'reshaped', expected 'hook_call_index' or"),
        ({"loop_axis_provenance": "Hook_call_index"}, "Hook_call_index"),
        ({"router_logits_are_presoftmax": False}, "router_logits_are_presoftmax is False"),
        ({"num_stacks": 0}, "num_stacks=0"),
        ({"num_layers_in_stack": 0}, "num_layers_in_stack=0"),
    ],
)
def test_meta_refuses(changes, names):
    with pytest.raises(TraceError, match=names):
        dataclasses.replace(META, **changes).check()


def test_meta_defaults_state_the_contract():
    meta = TraceMeta(num_stacks=1, num_layers_in_stack=1, num_experts=1, num_active=1)
    assert meta.router_logits_are_presoftmax is True
    assert meta.loop_axis_provenance == "hook_call_index"
