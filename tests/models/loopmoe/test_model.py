import copy
import dataclasses

import pytest
import torch

from loopscope import ACTIVE_TRACE_SINK, VisitSpec
from loopscope.errors import ConfigError
from loopscope.models.loopmoe import FLAVORS, build_config, load_balancing_loss, router_z_loss
from loopscope.models.loopmoe.experts import LoopGroupedExperts


def small(**changes):
    shape = dataclasses.replace(
        FLAVORS["debug"], dim=32, num_heads=2, expert_hidden_dim=16, vocab_size=64, max_seq_len=32, **changes
    )
    torch.manual_seed(0)
    model = build_config(shape).build()
    model.verify_module_protocol()
    model.init_weights(buffer_device=None)
    return model


def traced(model, tokens):
    ACTIVE_TRACE_SINK.arm()
    try:
        output = model(tokens, return_aux=True)
    finally:
        window = ACTIVE_TRACE_SINK.disarm()
    return output, window


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def test_the_blocks_are_direct_children_of_layers():
    assert [name for name, _ in small().layers.named_children()] == ["head", "loop_0", "loop_1", "tail"]


def test_expected_visits_follow_the_unrolled_depth():
    visits = small().expected_visits()
    assert [v.unrolled_pos for v in visits] == list(range(8))
    assert [(v.block, v.loop_step, v.layer_idx) for v in visits] == [
        ("head", 0, 0),
        ("loop", 0, 0),
        ("loop", 0, 1),
        ("loop", 1, 0),
        ("loop", 1, 1),
        ("loop", 2, 0),
        ("loop", 2, 1),
        ("tail", 0, 0),
    ]
    assert visits[0] == VisitSpec(
        block="head", unrolled_pos=0, loop_step=0, layer_idx=0, num_experts=8, top_k=2
    )
    assert visits[3].num_experts == 16


def test_a_forward_records_exactly_its_expected_visits(tokens):
    model = small()
    (logits, lb_loss, z_loss), window = traced(model, tokens)
    assert logits.shape == (2, 16, 64)
    assert not window.faults
    for spec in model.expected_visits():
        point = window[spec.unrolled_pos]
        assert {f.name: getattr(point, f.name) for f in dataclasses.fields(spec)} == dataclasses.asdict(spec)
        assert point.router_logits.shape == (2, 16, spec.num_experts)
        assert point.router_logits.dtype == torch.float32
        assert not any(tensor.requires_grad for tensor in point.tensors().values())
        torch.testing.assert_close(point.router_probs, point.router_logits.softmax(-1))
        torch.testing.assert_close(point.topk_weights.sum(-1), torch.ones(2, 16))
        chosen = point.router_logits.gather(-1, point.topk_idx)
        assert torch.equal(chosen, point.router_logits.topk(spec.top_k).values)
    assert lb_loss.item() == pytest.approx(
        sum(load_balancing_loss(p.router_probs, p.topk_idx).item() for p in window.values()) / 8, rel=1e-6
    )
    assert z_loss.item() == pytest.approx(
        sum(router_z_loss(p.router_logits).item() for p in window.values()) / 8, rel=1e-6
    )


def test_recording_changes_nothing_and_disarmed_records_nothing(tokens):
    model = small()
    plain = model(tokens)
    (armed, _, _), window = traced(model, tokens)
    assert torch.equal(plain, armed)
    assert len(window) == 8
    assert not ACTIVE_TRACE_SINK.armed


def test_the_stack_is_shared_so_its_gradient_sums_over_loop_steps(tokens):
    """The gradient of a shared block equals the sum over R unshared copies with the same weights."""
    model = small(num_loop_steps=2, num_layers_in_stack=1)
    unrolled = small(num_loop_steps=1, num_layers_in_stack=2)
    for name in ("tok_embeddings", "norm", "lm_head"):
        getattr(unrolled, name).load_state_dict(getattr(model, name).state_dict())
    for name, source in (("head", "head"), ("loop_0", "loop_0"), ("loop_1", "loop_0"), ("tail", "tail")):
        unrolled.layers[name].load_state_dict(model.layers[source].state_dict())
    for m in (model, unrolled):
        m(tokens).square().mean().backward()
    shared = dict(model.layers["loop_0"].named_parameters())
    first, second = (dict(unrolled.layers[f"loop_{i}"].named_parameters()) for i in (0, 1))
    for name, parameter in shared.items():
        torch.testing.assert_close(parameter.grad, first[name].grad + second[name].grad)


def test_experts_equal_one_dense_swiglu_per_expert():
    torch.manual_seed(0)
    experts = LoopGroupedExperts.Config(dim=8, hidden_dim=12, num_experts=3).build()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x_RD, counts = torch.randn(7, 8), torch.tensor([4, 0, 3])
    reference = copy.deepcopy(experts)
    rows = []
    for e, rows_of_e in enumerate(x_RD.split(counts.tolist())):
        gated = torch.nn.functional.silu(rows_of_e @ reference.w1_EFD[e].T) * (
            rows_of_e @ reference.w3_EFD[e].T
        )
        rows.append(gated @ reference.w2_EDF[e].T)
    out = experts(x_RD, counts)
    torch.testing.assert_close(out, torch.cat(rows))
    out.square().sum().backward()
    torch.cat(rows).square().sum().backward()
    for name, parameter in experts.named_parameters():
        torch.testing.assert_close(parameter.grad, dict(reference.named_parameters())[name].grad)


def test_flops_count_a_shared_layer_once_per_loop_step():
    once, thrice = small(num_loop_steps=1), small(num_loop_steps=3)
    counted = [m.config.get_nparams_and_flops(m, 16) for m in (once, thrice)]
    assert counted[0][0] == counted[1][0] == sum(p.numel() for p in once.parameters())
    dense = small(num_loop_steps=2).config.get_nparams_and_flops(small(num_loop_steps=2), 16)[1]
    assert counted[1][1] - dense == dense - counted[0][1] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loop_top_k": 17}, ["loop_top_k is 17", "loop_num_experts 16", "top_k <= num_experts"]),
        ({"edge_top_k": 0}, ["edge_top_k is 0"]),
        ({"num_loop_steps": 0}, ["num_loop_steps is 0", ">= 1"]),
        ({"num_layers_in_stack": 0}, ["num_layers_in_stack is 0", ">= 1"]),
        ({"num_heads": 5}, ["num_heads 5"]),
        ({"dropout": 1.5}, ["dropout is 1.5"]),
        ({"lb_loss_factor": -1.0}, ["lb_loss_factor is -1.0"]),
    ],
)
def test_impossible_shapes_are_refused_by_name(changes, words):
    with pytest.raises(ConfigError) as caught:
        build_config(dataclasses.replace(FLAVORS["debug"], **changes))
    for word in words:
        assert word in str(caught.value)


def test_unknown_flavour_and_field_are_refused():
    from loopscope.models.loopmoe import model_registry

    with pytest.raises(ConfigError, match=r"flavour is 'huge', expected one of debug, wide"):
        model_registry("huge")
    with pytest.raises(ConfigError, match="has no field depth"):
        model_registry("debug", depth=3)
