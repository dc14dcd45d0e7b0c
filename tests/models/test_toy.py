import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscope import reduce_trace
from loopscope.models.toy import ToyLoopMoE
from loopscope.trace import ACTIVE_TRACE_SINK


def trace(model, ids):
    ACTIVE_TRACE_SINK.arm()
    try:
        output = model(ids)
    finally:
        window = ACTIVE_TRACE_SINK.disarm(on_error="raise")
    return output, window


@settings(max_examples=15, deadline=None)
@given(layers=st.integers(1, 3), loops=st.integers(1, 4), outer=st.integers(2, 5))
def test_what_it_records_is_what_it_promises(layers, loops, outer):
    model = ToyLoopMoE(vocab_size=7, num_layers_in_stack=layers, num_stacks=loops, outer_experts=outer)
    _, window = trace(model, torch.zeros(1, 3, dtype=torch.int64))
    fields = ("block", "unrolled_pos", "loop_step", "layer_idx", "num_experts", "top_k")
    promised = [tuple(getattr(spec, name) for name in fields) for spec in model.expected_visits()]
    seen = [tuple(getattr(point, name) for name in fields) for _, point in sorted(window.items())]
    assert seen == promised
    assert len(seen) == layers * loops + 2
    assert [point[0] for point in seen] == ["head", *["loop"] * (layers * loops), "tail"]
    model.trace_meta().check()


def test_points_hold_what_the_contract_says():
    torch.manual_seed(0)
    model = ToyLoopMoE(vocab_size=7)
    _, window = trace(model, torch.randint(7, (2, 5)))
    for point in window.values():
        assert not any(tensor.requires_grad for tensor in point.tensors().values())
        torch.testing.assert_close(point.router_probs, point.router_logits.softmax(-1))
        torch.testing.assert_close(point.topk_weights.sum(-1), torch.ones(2, 5))
        assert torch.equal(point.topk_idx.sort(-1).values, point.router_probs.topk(2).indices.sort(-1).values)
        assert point.residual.shape == (2, 5, 32)


def test_recording_changes_nothing_and_nothing_is_recorded_unarmed():
    torch.manual_seed(0)
    model, ids = ToyLoopMoE(vocab_size=7), torch.randint(7, (2, 5))
    plain = model(ids)
    traced, window = trace(model, ids)
    assert all(torch.equal(one, other) for one, other in zip(plain, traced, strict=True))
    assert len(window) == 8


def test_tokens_do_not_see_the_future():
    torch.manual_seed(0)
    model, ids = ToyLoopMoE(vocab_size=7), torch.randint(7, (1, 6))
    changed = ids.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 7
    one, other = model(ids)[0], model(changed)[0]
    assert torch.equal(one[:, :4], other[:, :4])
    assert not torch.equal(one[:, 4], other[:, 4])


def test_its_own_losses_agree_with_the_rows():
    torch.manual_seed(0)
    model, ids = ToyLoopMoE(vocab_size=7), torch.randint(7, (2, 16))
    (_, lb, z), window = trace(model, ids)
    rows = reduce_trace(window, model.trace_meta())["router"]
    assert sum(row["lb_loss"] for row in rows) / len(rows) == pytest.approx(lb.item(), abs=1e-5)
    assert sum(row["z_sq_mean"] for row in rows) / len(rows) == pytest.approx(z.item(), rel=1e-5)
