"""torchtitan's own MoE models through its own trainer, recompute on: its counts, counted once, are loopscope's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loopscope.models import cpu_compat

cpu_compat.enable()

import loopscope  # noqa: E402
from loopscope.capture import CoverageError, ReconcileError  # noqa: E402
from loopscope.capture.proof import Routing, reconcile  # noqa: E402
from loopscope.capture.source import DECODERS  # noqa: E402
from loopscope.errors import UnsupportedError  # noqa: E402
from loopscope.integrations.torchtitan.moe_adapter import TorchtitanAdapter, observe, routing_of  # noqa: E402
from loopscope.trace import ACTIVE_TRACE_SINK  # noqa: E402

DRIVER = Path(__file__).with_name("moe_driver.py")
FAMILIES = {"deepseek_v3": (1, 2), "qwen3": (0, 1, 2), "gpt_oss": (0, 1, 2), "qwen3@": (0, 1, 2)}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_counts_equal_torchtitans_own_counted_once(
    ranks: int, prepared_text: Any, tmp_path: Path, rank_processes: Any
) -> None:
    arguments = [str(tmp_path), str(prepared_text.tokenizer_path), str(prepared_text.dataset_path), *FAMILIES]
    statuses, output = rank_processes.run(DRIVER, *arguments, ranks=ranks)
    assert statuses == [0] * ranks, output[-6000:]
    for family, layers in FAMILIES.items():
        own = [json.loads((tmp_path / f"{family}.{rank}.json").read_text()) for rank in range(ranks)]
        rows = loopscope.open_run(tmp_path / family).arrow("router").to_pylist()
        assert {(row["step"], row["layer_idx"]) for row in rows} == {
            (s, n) for s in (1, 2, 3) for n in layers
        }
        for row in rows:
            name = f"layers.{row['layer_idx']}._checkpoint_wrapped_module.moe"
            per_rank = [counts[row["step"] - 1][name] for counts in own]
            # Recompute runs the router twice, so torchtitan counts every token twice.
            assert row["expert_count"] == [sum(counts) // 2 for counts in zip(*per_rank, strict=True)], (
                family,
                row,
            )
        health = loopscope.open_run(tmp_path / family).arrow("health").to_pylist()
        assert {row["value"] for row in health if row["event"] == "coverage"} == {1.0}


def small(**router: Any) -> Any:
    """deepseek_v3's debug flavour in two layers, on one process, without a trainer."""
    from torchtitan.models import deepseek_v3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = deepseek_v3.model_registry("debugmodel", attn_backend="varlen").model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if layer.moe is not None:
            for name, value in router.items():
                setattr(layer.moe.router, name, value)
    torch.manual_seed(0)
    model = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias_E"):
            torch.nn.init.normal_(buffer, std=0.1)
    return model.train()


def recorded(model: Any, tokens: torch.Tensor) -> Any:
    ACTIVE_TRACE_SINK.arm()
    try:
        model(tokens)
    finally:
        window = ACTIVE_TRACE_SINK.disarm()
    return window


TOKENS = torch.arange(48).reshape(2, 24) * 37 % 2048


@pytest.mark.parametrize(
    "router",
    [
        {"score_func": "softmax"},
        {"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5},
        {"score_func": "sigmoid", "num_expert_groups": 4, "num_limited_groups": 2},
        {"_debug_force_load_balance": True},
    ],
    ids=["softmax", "sigmoid", "groups", "forced"],
)
def test_an_observed_model_has_the_contract_and_its_choice_is_recomputed(router: dict[str, Any]) -> None:
    model = small(**router)
    watch = observe(model)
    try:
        window = recorded(model, TOKENS)
    finally:
        watch.remove()
    assert [visit.num_experts for visit in model.expected_visits()] == [0, 8]
    assert sorted(window) == [0, 1]
    assert window[0].is_dense
    point, moe = window[1], model.layers["1"].moe
    counts = torch.bincount(point.topk_idx.flatten(), minlength=8)
    assert counts.tolist() == moe.tokens_per_expert_E.long().tolist()
    raw = Routing(point.router_logits.flatten(0, 1), point.topk_idx.flatten(0, 1), None, point.expert_bias)
    reconcile(raw, routing_of(moe))
    torch.testing.assert_close(point.topk_weights.sum(-1), torch.ones(2, 24))
    assert model.trace_meta().num_layers_in_stack == 2
    assert not any(module._forward_hooks for module in model.modules())


ROUTER, GATE = "layers.1.moe.router", "layers.1.moe.router.gate"
WRONG = {
    "swapped": {ROUTER: {"topk_weights": "output[2]", "topk_idx": "output[1]", "router_probs": "output[0]"}},
    "weights as indices": {ROUTER: {"topk_weights": "output[1]", "topk_idx": "output[0]"}},
    "probabilities": {GATE: {"router_logits": "decode.test_probabilities"}},
    "arg-max": {ROUTER: {"topk_idx": "decode.test_argmax"}},
    "largest index": {GATE: {"router_logits": "decode.test_fewer"}},
}


@pytest.mark.filterwarnings("ignore:.*drops what was derived")
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_the_reconciliation_fires(name: str, score_func: str, monkeypatch: pytest.MonkeyPatch) -> None:
    score = torch.sigmoid if score_func == "sigmoid" else lambda logits: logits.softmax(-1)
    monkeypatch.setitem(DECODERS, "test_probabilities", lambda module, output: score(output))
    monkeypatch.setitem(DECODERS, "test_argmax", lambda module, output: output[1][..., :1])
    monkeypatch.setitem(DECODERS, "test_fewer", lambda module, output: output[..., :-1])
    model = small(score_func=score_func)
    derived = TorchtitanAdapter(model).plan
    wrong = {
        module: {"tensors": {**derived[module].tensors, **changes}} for module, changes in WRONG[name].items()
    }
    adapter = TorchtitanAdapter(model, overrides=wrong)
    with adapter.listening() as window:
        model(TOKENS)
    with pytest.raises(ReconcileError):
        window.points()


def test_layers_that_are_not_declared_as_moe_are_refused() -> None:
    model = small()
    model.config.layers = [model.config.layers[1]] * 2
    with pytest.raises(CoverageError, match=r"declares MoE layers \[0, 1\]"):
        TorchtitanAdapter(model)


def test_settings_come_from_the_trainers_own_configuration() -> None:
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    from loopscope.integrations.torchtitan.checks import check_support, settings_from

    config = qwen3_moe_debug()
    config.training.disable_cuda_graphs = True
    check_support(config)
    assert {"recompute"} <= settings_from(config).fields_set
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(UnsupportedError, match="pipeline_parallel=True"):
        check_support(config)
