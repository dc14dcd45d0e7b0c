"""mlx-lm's models, trained for a few steps, against a re-computation in NumPy from their own weights."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optimizers  # noqa: E402
from mlx_lm.models import mixtral, olmoe, qwen3_moe  # noqa: E402

import loopscope  # noqa: E402
from loopscope.capture import CoverageError, PlanError, ReconcileError  # noqa: E402
from loopscope.capture.source import DECODERS  # noqa: E402
from loopscope.errors import UnsupportedError  # noqa: E402

BASE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 16, "num_attention_heads": 4, "vocab_size": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "olmoe": (
        lambda: olmoe.Model(olmoe.ModelArgs(model_type="olmoe", num_experts=8, num_experts_per_tok=3, **BASE)),
        (0, 1, 2),
    ),
    "qwen3_moe": (
        lambda: qwen3_moe.Model(
            qwen3_moe.ModelArgs(
                model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1,
                mlp_only_layers=[1],
                moe_intermediate_size=16, num_key_value_heads=2, head_dim=8, rope_theta=1e4, tie_word_embeddings=False,
                max_position_embeddings=64, norm_topk_prob=True, **BASE,
            )
        ),
        (0, 2),
    ),
    "mixtral": (
        lambda: mixtral.Model(
            mixtral.ModelArgs(
                model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2, **BASE
            )
        ),
        (0, 1, 2),
    ),
}  # fmt: skip


def build(name: str) -> Any:
    mx.random.seed(0)
    model = FAMILIES[name][0]()
    mx.eval(model.parameters())
    return model.train()


def tokens() -> Any:
    return mx.random.randint(0, 64, (2, 10), key=mx.random.key(1))


def loss(model: Any, ids: Any) -> Any:
    return nn.losses.cross_entropy(model(ids)[:, :-1], ids[:, 1:]).mean()


def counts_by_hand(name: str, model: Any, ids: Any) -> dict[int, list[int]]:
    """Runs the layers one after the other, and routes each token in NumPy."""
    found = {}
    h = model.model.embed_tokens(ids)
    for number, layer in enumerate(model.model.layers):
        x = h + layer.self_attn(layer.input_layernorm(h), "causal", None)
        block = getattr(layer, "mlp", None) or layer.block_sparse_moe
        if number in FAMILIES[name][1]:
            inner = np.array(layer.post_attention_layernorm(x)).reshape(-1, 32)
            logits = inner @ np.array(block.gate.weight).T
            top_k = getattr(block, "top_k", None) or block.num_experts_per_tok
            used = np.argsort(-logits, axis=-1)[:, :top_k]
            found[number] = [int((used == expert).sum()) for expert in range(logits.shape[-1])]
        h = layer(h, "causal", None)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_training_steps_give_the_models_own_counts(name: str, tmp_path: Path) -> None:
    model = build(name)
    ids, adam = tokens(), optimizers.Adam(1e-2)
    step = nn.value_and_grad(model, loss)
    expected = []
    with loopscope.attach(model, out=tmp_path / "run", on_error="raise", backend="mlx") as run:
        for _ in range(3):
            model.eval()
            expected.append(counts_by_hand(name, model, ids))
            model.train()
            value, gradients = step(model, ids)
            adam.update(model, gradients)
            mx.eval(value, model.parameters())
            run.log_loss(value.item())
    assert type(model) is type(FAMILIES[name][0]())
    found = loopscope.open_run(tmp_path / "run")
    rows = found.arrow("router").to_pylist()
    assert [(row["step"], row["layer_idx"]) for row in rows] == [
        (step, layer) for step in (1, 2, 3) for layer in FAMILIES[name][1]
    ]
    for row in rows:
        assert row["expert_count"] == expected[row["step"] - 1][row["layer_idx"]]
    assert found.arrow("residual").num_rows == 9
    losses = found.arrow("loss")["task_loss"].to_pylist()
    assert losses[-1] < losses[0]
    health = found.arrow("health").to_pylist()
    assert {row["value"] for row in health if row["event"] == "coverage"} == {1.0}


def test_the_backend_is_told_from_the_model(tmp_path: Path) -> None:
    model = build("mixtral")
    with loopscope.attach(model, out=tmp_path / "run", on_error="raise", every=1):
        mx.eval(nn.value_and_grad(model, loss)(model, tokens()))
    assert loopscope.open_run(tmp_path / "run").arrow("router").num_rows == 3


GATES, EXPERTS = "model.layers.*.mlp.gate", "model.layers.*.mlp.switch_mlp"
ROUTING = {
    "num_experts": 8, "top_k": 3, "score_func": "softmax", "order": "score_then_topk", "normalised": False,
    "balancing": "unknown",
}  # fmt: skip
WRONG: dict[str, dict[str, Any]] = {
    "probabilities": {GATES: {"tensors": {"router_logits": "decode.mlx_softmax"}}},
    "swapped": {GATES: {"tensors": {"router_logits": "output", "router_probs": "input[0]"}}},
    "arg-max": {
        GATES: {"tensors": {"router_logits": "output", "topk_idx": "decode.test_argmax"}, "routing": ROUTING},
        EXPERTS: {"tensors": {}},
    },
    "largest index": {GATES: {"tensors": {"router_logits": "decode.test_fewer"}}},
}


@pytest.mark.filterwarnings("ignore:.*drops what was derived")
@pytest.mark.parametrize("name", WRONG)
def test_the_reconciliation_fires(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        DECODERS, "test_argmax", lambda module, output: mx.argmax(output, axis=-1, keepdims=True)
    )
    monkeypatch.setitem(DECODERS, "test_fewer", lambda module, output: output[..., :-1])
    model = build("olmoe")
    with (
        pytest.raises(ReconcileError),
        loopscope.attach(model, out=tmp_path / "run", plan=WRONG[name], on_error="raise"),
    ):
        model(tokens())


def test_a_dense_layer_declared_as_moe_and_an_unknown_block_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("qwen3_moe")
    model.args.mlp_only_layers = []
    with pytest.raises(CoverageError, match=r"declares MoE layers \[0, 1, 2\]"):
        loopscope.attach(model, out="nowhere")
    from loopscope.capture import mlx_adapter

    monkeypatch.setattr(mlx_adapter, "FAMILIES", {})
    with pytest.raises(PlanError, match="is a OlmoeSparseMoeBlock"):
        loopscope.attach(build("olmoe"), out="nowhere")


def test_a_compiled_step_says_so(tmp_path: Path) -> None:
    model = build("olmoe")
    step = mx.compile(lambda ids: model(ids))
    with (
        pytest.raises(UnsupportedError, match=r"inside mx.compile"),
        loopscope.attach(model, out=tmp_path / "run", on_error="raise"),
    ):
        step(tokens())
    assert not loopscope.open_run(tmp_path / "run").arrow("router").num_rows


def test_copies_are_plain_models_and_hooks_go_when_training_raises(tmp_path: Path) -> None:
    model = build("olmoe")
    own = type(model)
    with pytest.raises(KeyError), loopscope.attach(model, out=tmp_path / "run", on_error="raise") as run:  # noqa: PT012
        assert type(model) is not own
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        assert type(pickled) is own
        for other in (copied, pickled):
            assert mx.array_equal(other(tokens()), model.eval()(tokens()))
            model.train()
        assert run.step == 0
        raise KeyError
    assert type(model) is own


def test_a_dense_model_gives_residual_rows_alone(tmp_path: Path) -> None:
    from mlx_lm.models import llama

    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(model_type="llama", num_key_value_heads=2, **BASE)).train()
    ids, norms = tokens(), []
    h = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        h = layer(h, "causal", None)
        norms.append(float(np.linalg.norm(np.array(h), axis=-1).mean()))
    with loopscope.attach(model, out=tmp_path / "run", on_error="raise") as run:
        run.log_loss(float(loss(model, ids).item()))
    read = loopscope.open_run(tmp_path / "run")
    rows = read.arrow("residual").to_pylist()
    assert [row["layer_idx"] for row in rows] == [0, 1, 2]
    assert [row["norm_mean"] for row in rows] == pytest.approx(norms, rel=1e-5)
    assert not read.arrow("router").num_rows


def test_a_model_whose_arguments_name_experts_that_are_not_there_is_refused() -> None:
    from mlx_lm.models import llama

    model = llama.Model(llama.ModelArgs(model_type="llama", num_key_value_heads=2, **BASE)).train()
    model.args.num_experts = 8
    with pytest.raises(CoverageError, match="no router was found"):
        loopscope.attach(model, out="nowhere")
