"""Every family against a re-computation of its routing from the model's own weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

hf = pytest.importorskip("transformers")

from hf_models import FAMILIES, build  # noqa: E402

import loopscope  # noqa: E402
from loopscope.capture import CoverageError, PlanError, ReconcileError  # noqa: E402
from loopscope.capture.transformers_adapter import TransformersAdapter  # noqa: E402


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def logits_by_hand(name: str, layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(logits, what the choice is made by, k), written down again from the layer's weights; x is the MoE's input."""
    if name == "jetmoe":
        gate = layer.mlp.router
        logits = x @ gate.layer.weight.T
        return logits, logits, gate.top_k
    if name == "gpt_oss":
        gate = layer.mlp.router
        logits = x @ gate.weight.T + gate.bias
        return logits, logits, gate.top_k
    gate = layer.mlp.gate
    logits = x @ gate.weight.T
    if name != "deepseek_v3":
        return logits, logits, gate.top_k
    by = torch.sigmoid(logits) + gate.e_score_correction_bias
    pairs = by.reshape(*by.shape[:-1], gate.num_group, -1)
    sums = pairs.sort(-1, descending=True).values[..., :2].sum(-1)
    best = sums.argsort(-1, descending=True)[..., : gate.topk_group]
    allowed = torch.zeros_like(sums).scatter(-1, best, 1.0).repeat_interleave(pairs.shape[-1], -1).bool()
    return logits, by.masked_fill(~allowed, -torch.inf), gate.top_k


def counts_by_hand(name: str, model: Any, inputs: dict[str, torch.Tensor]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    handles = []
    for number, layer in enumerate(model.model.layers):
        if number not in FAMILIES[name][1]:
            continue

        def note(module: Any, args: Any, number: int = number, layer: Any = layer) -> None:
            logits, by, top_k = logits_by_hand(name, layer, args[0])
            used = by.argsort(-1, descending=True)[..., :top_k][inputs["attention_mask"].bool()]
            found[number] = [int((used == expert).sum()) for expert in range(logits.shape[-1])]

        handles.append(layer.mlp.register_forward_pre_hook(note))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_equal_a_recomputation_from_the_weights(name: str, tmp_path: Path) -> None:
    model, inputs = build(name).train(), batch()
    expected = counts_by_hand(name, model, inputs)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    with loopscope.attach(model, out=tmp_path / "run", on_error="raise"):
        model(**inputs).loss.backward()
    run = loopscope.open_run(tmp_path / "run")
    found = {row["layer_idx"]: row["expert_count"] for row in run.arrow("router").to_pylist()}
    assert found == expected
    assert tuple(sorted(found)) == FAMILIES[name][1]
    assert run.arrow("residual").num_rows == 3  # dense layers interleaved keep their numbers and residuals
    assert set(run.arrow("router")["num_tokens"].to_pylist()) == {20}
    coverage = [row["value"] for row in run.arrow("health").to_pylist() if row["event"] == "coverage"]
    assert coverage == [1.0]


@pytest.mark.parametrize("name", FAMILIES)
def test_routing_says_where_every_value_was_read(name: str) -> None:
    with torch.device("meta"):
        plan = TransformersAdapter(FAMILIES[name][0]()).plan
    routings = [spec.routing for spec in plan.values() if spec.routing is not None]
    assert len(routings) == len(FAMILIES[name][1]) == len(plan.declared_layers or ())
    for routing in routings:
        assert {"num_experts", "top_k", "balancing"} <= set(routing.sources)
        for place in ", ".join(routing.sources.values()).split(", "):
            assert place.startswith(("config.", "the router's"))


SWAPS = {
    "weights and indices": {"topk_weights": "output[2]", "topk_idx": "output[1]"},
    "logits and weights": {"router_logits": "output[1]", "topk_weights": "output[0]"},
    "arg-max": {"topk_idx": "decode.test_argmax"},
    "probabilities": {"router_logits": "decode.test_probabilities"},
    "fewer experts": {"router_logits": "decode.test_fewer"},
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_the_reconciliation_fires(
    name: str, swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loopscope.capture.source import DECODERS

    monkeypatch.setitem(DECODERS, "test_argmax", lambda module, output: output[0].argmax(-1, keepdim=True))
    monkeypatch.setitem(DECODERS, "test_probabilities", lambda module, output: output[0].float().softmax(-1))
    monkeypatch.setitem(DECODERS, "test_fewer", lambda module, output: output[0][:, :-1])
    model = build(name).train()
    derived = TransformersAdapter(model).plan
    router = next(key for key, spec in derived.items() if spec.routing is not None)
    wrong = {router: {"tensors": {**derived[router].tensors, **SWAPS[swap]}}}
    with (
        pytest.raises(ReconcileError),
        loopscope.attach(model, out=tmp_path / "run", plan=wrong, on_error="raise"),
    ):
        model(**batch()).loss.backward()


def test_a_dense_layer_counted_as_moe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe")
    model.config.mlp_only_layers = []
    with pytest.raises(CoverageError, match=r"found in layers \[0, 2\].*declares MoE layers \[0, 1, 2\]"):
        TransformersAdapter(model)


def test_a_model_without_routers_is_refused() -> None:
    dense = hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                               num_attention_heads=4, vocab_size=64))  # fmt: skip
    with pytest.raises(PlanError, match="declares no router"):
        loopscope.attach(dense, out="nowhere")


def test_the_loss_is_taken_apart(tmp_path: Path) -> None:
    model = build("mixtral").train()
    with loopscope.attach(model, out=tmp_path / "run", on_error="raise"):
        output = model(**batch())
        output.loss.backward()
    row = loopscope.open_run(tmp_path / "run").arrow("loss").to_pylist()[0]
    assert row["total_loss"] == pytest.approx(float(output.loss.detach()), rel=1e-6)
    factor = model.config.router_aux_loss_coef * 2
    assert row["lb_loss_factor"] == pytest.approx(factor)
    assert row["lb_loss"] == pytest.approx(float(output.aux_loss.detach()) / 2, rel=1e-6)
    # The task's part is what is left of the total: no second source could disagree with it.
    assert row["closure_error"] is None
    assert json.loads(row["null_reasons"])["closure_error"].startswith("absent:")
