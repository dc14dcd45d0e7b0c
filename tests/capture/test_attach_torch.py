from __future__ import annotations

import copy
import io
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_models import BLOCK, TOP_K, Recurrent, ids, make, plan, train_step
from torch import nn

import loopscope
from loopscope.capture import Capture, CoverageError, PlanError, ReconcileError, reducer
from loopscope.capture.source import DECODERS
from loopscope.errors import RunExistsError, TraceError, UnsupportedError
from loopscope.models.toy import ToyLoopMoE
from loopscope.trace import NullCollector


def attach(model: Any, out: Path, **changes: Any) -> Any:
    return loopscope.attach(model, out=out / "run", **{"plan": plan(), "on_error": "raise", **changes})


def rows(out: Path, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = loopscope.open_run(out / "run").arrow(table).to_pylist()
    return found


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def by_hand(model: Recurrent, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Counts per visit, from the model's own weights, without hooks and without its mixture's output."""
    counts = []

    def visit(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        logits = block.norm(x) @ block.moe.gate.weight.T
        used = torch.argsort(logits, -1, descending=True)[..., :TOP_K]
        counts.append(torch.tensor([(used == expert).sum() for expert in range(logits.shape[-1])]))
        return block(x)

    with torch.no_grad():
        e = visit(model.prelude, model.embed(tokens))
        h = torch.ones_like(e)
        for _ in range(model.loops):
            h = model.adapt(torch.cat([h, e], -1))
            for block in model.core:
                h = visit(block, h)
        visit(model.coda, h)
    return counts


def test_one_row_per_call_in_call_order_with_the_models_own_counts(tmp_path: Path) -> None:
    model = make()
    with attach(model, tmp_path, every=2) as run:
        train_step(model, seed=7)
        run.log_loss(1.5)
    found = sorted(rows(tmp_path, "router"), key=lambda row: row["unrolled_pos"])
    assert [(row["block"], row["loop_step"], row["layer_idx"]) for row in found] == [
        ("head", None, None), ("loop", 0, 0), ("loop", 0, 1), ("loop", 1, 0), ("loop", 1, 1), ("loop", 2, 0),
        ("loop", 2, 1), ("tail", None, None),
    ]  # fmt: skip
    expected = by_hand(model, ids(7))
    assert [row["expert_count"] for row in found] == [counts.tolist() for counts in expected]
    coverage = [row for row in rows(tmp_path, "health") if row["event"] == "coverage"]
    assert [row["value"] for row in coverage] == [1.0]
    assert [row["task_loss"] for row in rows(tmp_path, "loss")] == [1.5]
    assert hooks(model) == 0


def test_the_depth_may_vary_from_step_to_step(tmp_path: Path) -> None:
    model = make(2)
    with attach(model, tmp_path, plan=plan(loops=4)):
        for model.loops in (4, 2):
            train_step(model)
    found = rows(tmp_path, "router")
    assert [sum(row["step"] == step for row in found) for step in (1, 2)] == [10, 6]
    assert {row["num_loop_steps"] for row in found if row["step"] == 2} == {2}
    assert {row["value"] for row in rows(tmp_path, "health") if row["event"] == "coverage"} == {1.0}


def test_only_training_forwards_count_and_microbatches_make_one_step(tmp_path: Path) -> None:
    model = make()
    with attach(model, tmp_path, num_microbatches=2) as run:
        for step in range(3):
            for micro in range(2):
                train_step(model, seed=2 * step + micro)
            with torch.no_grad():
                model(ids())
            model.eval()
            model(ids())
            model.train()
        assert run.step == 3
    found = rows(tmp_path, "router")
    assert len(found) == 3 * 8
    assert {(row["num_microbatches"], row["num_tokens"]) for row in found} == {(2, 32)}


def test_a_mask_of_valid_tokens_is_the_users_to_give(tmp_path: Path) -> None:
    model = make()
    with attach(model, tmp_path, valid=lambda args, kwargs: args[0] < 16):
        train_step(model)
    assert {row["num_tokens"] for row in rows(tmp_path, "router")} == {int((ids() < 16).sum())}


def test_hooks_are_gone_when_training_raises(tmp_path: Path) -> None:
    model = make()
    with pytest.raises(ZeroDivisionError), attach(model, tmp_path):  # noqa: PT012
        train_step(model)
        assert hooks(model) == 2
        raise ZeroDivisionError
    assert hooks(model) == 0


@pytest.mark.parametrize("where", ["core.1", "coda"])
def test_hooks_are_gone_when_a_forward_raises_and_the_next_step_is_traced(tmp_path: Path, where: str) -> None:
    model = make()
    with attach(model, tmp_path):
        broken = model.get_submodule(where).register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_step(model)
        broken.remove()
        assert hooks(model) == 2
        train_step(model)
    assert {row["step"] for row in rows(tmp_path, "router")} == {1}  # the step that was tried again


def test_attaching_twice_is_an_error_and_again_afterwards_is_not(tmp_path: Path) -> None:
    model = make()
    with attach(model, tmp_path):
        with pytest.raises(TraceError, match="attached already"), attach(model, tmp_path / "other"):
            pass
        train_step(model)
    with attach(model, tmp_path / "later"):
        train_step(model)
    with pytest.raises(RunExistsError), attach(model, tmp_path):
        pass
    assert hooks(model) == 0


def test_a_copy_and_a_pickle_of_an_attached_model_are_plain_models(tmp_path: Path) -> None:
    model = make()
    with attach(model, tmp_path) as run:
        train_step(model)
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=False)
        for other in (copied, pickled, saved):
            torch.testing.assert_close(other(ids()), model.eval()(ids()))
            model.train()
            train_step(other)
        assert run.step == 1
    assert len(rows(tmp_path, "router")) == 8


def test_recompute_records_nothing(tmp_path: Path) -> None:
    model = make()
    inner = model.core[0].moe.forward
    model.core[0].moe.forward = lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)  # type: ignore[method-assign]
    with attach(model, tmp_path):
        train_step(model)
    assert len(rows(tmp_path, "router")) == 8


class Heard(NullCollector):
    def on_probe_step(
        self, step: int, sink: Any, meta: Any, per_token_loss: torch.Tensor
    ) -> dict[str, float]:
        self.visits = {
            pos: (point.block, point.loop_step, point.topk_idx.flatten().tolist())
            for pos, point in sink.items()
        }
        return {}


def test_a_probe_records_an_attached_model_and_counts_no_step(tmp_path: Path) -> None:
    model, heard = make(), Heard()
    with attach(model, tmp_path) as run:
        train_step(model)
        loopscope.run_probe_forward(model, ids(5), collector=heard, step=1, meta=run.trace_meta())
        assert run.step == 1
        train_step(model)
    assert [heard.visits[pos][:2] for pos in range(8)] == [
        ("head", 0), ("loop", 0), ("loop", 0), ("loop", 1), ("loop", 1), ("loop", 2), ("loop", 2), ("tail", 0)
    ]  # fmt: skip
    counts = [[heard.visits[pos][2].count(expert) for expert in range(6)] for pos in range(8)]
    assert counts == [found.tolist() for found in by_hand(model, ids(5))]
    assert len(rows(tmp_path, "router")) == 16


# -- mistakes ----------------------------------------------------------------------------------------------------


def test_a_model_without_a_plan_is_refused_with_a_draft() -> None:
    with pytest.raises(CoverageError, match="Give a plan with at least one block"):
        loopscope.attach(make(), out="nowhere")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"router_logits": "output[1][1]", "topk_idx": "output[1][2]"}, "expected \\[tokens, 6\\]"),
        ({"router_logits": "output[1][0]", "topk_idx": "output[1][1]"}, "expected integers"),
        ({"router_logits": "output[1][0]", "topk_idx": "output[2]"}, "has no item 2"),
    ],
)
def test_a_wrong_source_is_told_or_stops_the_first_traced_step(
    tmp_path: Path, tensors: dict[str, str], message: str
) -> None:
    wrong = plan()
    wrong["*.moe"]["tensors"] = tensors
    model = make()
    with pytest.raises(ReconcileError, match=message), attach(model, tmp_path, plan=wrong):
        train_step(model)
    assert hooks(model) == 0
    with attach(model, tmp_path / "recorded", plan=wrong, on_error="record") as run:
        for _ in range(2):
            train_step(model)
        assert run.step == 2  # training went on
    assert not rows(tmp_path / "recorded", "router")
    told = [row for row in rows(tmp_path / "recorded", "health") if row["event"] == "capture_failed"]
    assert [(row["step"], row["severity"]) for row in told] == [(1, "critical"), (2, "critical")]
    assert all(re.search(message, row["detail"]) for row in told)


WRONG = {
    "swapped": {"topk_weights": "output[1][2]", "topk_idx": "output[1][1]"},
    "probabilities": {"router_logits": "decode.test_probabilities"},
    "arg-max": {"topk_idx": "decode.test_argmax"},
    "largest index": {"router_logits": "decode.test_fewer"},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_reconciliation_fires(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODERS, "test_probabilities", lambda module, output: output[1][0].softmax(-1))
    monkeypatch.setitem(DECODERS, "test_argmax", lambda module, output: output[1][0].argmax(-1, keepdim=True))
    monkeypatch.setitem(DECODERS, "test_fewer", lambda module, output: output[1][0][..., :5])
    wrong = plan()
    wrong["*.moe"]["tensors"] = {**wrong["*.moe"]["tensors"], **WRONG[name]}
    model = make()
    with pytest.raises(ReconcileError), attach(model, tmp_path, plan=wrong):
        train_step(model)


def test_nothing_of_a_trace_outlives_its_forward(tmp_path: Path) -> None:
    model = make()
    kept: list[weakref.ref[torch.Tensor]] = []
    with attach(model, tmp_path) as run:
        hear = run.collector.on_trace_step

        def noting(step: int, sink: Any, meta: Any, **options: Any) -> Any:
            kept.extend(weakref.ref(tensor) for point in sink.values() for tensor in point.tensors().values())
            return hear(step, sink, meta, **options)

        run.collector.on_trace_step = noting
        model(ids())
        assert len(kept) == 8 * 5
        assert not [ref for ref in kept if ref() is not None]


def test_a_module_that_is_never_called_stops_the_first_traced_step(tmp_path: Path) -> None:
    model = make()
    model.unused = nn.Linear(16, 16)
    wrong = {**plan(), "unused": dict(BLOCK)}
    with (
        pytest.raises(CoverageError, match="were not called, or their hooks did not run: unused"),
        attach(model, tmp_path, plan=wrong),
    ):
        train_step(model)


def test_require_and_rejected_settings_stop_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"require: router.dropped_assignments is absent"):
        attach(make(), tmp_path, require=["dropped_assignments"])
    assert not (tmp_path / "run").exists()


# -- compile ------------------------------------------------------------------------------------------------------


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compile_blocks(model: Recurrent) -> Recurrent:
    for block in model.core:
        block.compile(backend="eager", fullgraph=True)
    return model


def wrap_blocks(model: Recurrent) -> Recurrent:
    for index in range(2):
        model.core[index] = torch.compile(model.core[index], backend="eager")  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (compiled, None),
        (compile_blocks, None),
        (None, compile_blocks),
        (wrap_blocks, None),
        (None, wrap_blocks),
    ],
    ids=["model-before", "blocks-before", "blocks-after", "wrapped-before", "wrapped-after"],
)
def test_compile_in_either_order_gives_every_row(tmp_path: Path, before: Any, after: Any) -> None:
    torch._dynamo.reset()
    model = make()
    target = before(model) if before else model
    with attach(target, tmp_path, every=12):
        target = after(target) if after else target
        for step in range(12):
            train_step(target, seed=step)
    found = rows(tmp_path, "router")
    assert {row["step"] for row in found} == {*range(1, 11), 12}
    assert len(found) == 11 * 8
    first = [row["expert_count"] for row in found if row["step"] == 1]
    assert first == [counts.tolist() for counts in by_hand(make(), ids(0))]


def test_compiling_in_place_before_attaching_says_the_order(tmp_path: Path) -> None:
    model = make()
    model.compile(backend="eager")
    with (
        pytest.raises(UnsupportedError, match=r"model = torch.compile\(model\) and attach to the result"),
        attach(model, tmp_path),
    ):
        pass


@pytest.mark.parametrize("in_place", [False, True])
def test_compiling_the_whole_model_after_attaching_says_the_order(tmp_path: Path, in_place: bool) -> None:
    torch._dynamo.reset()
    model: Any = make()
    with (
        pytest.raises(UnsupportedError, match="Compile first and attach to the result"),
        attach(model, tmp_path),
    ):
        train_step(compile_in_place(model) if in_place else compiled(model))
    assert hooks(model) == 0


# -- custom metrics, own contract -----------------------------------------------------------------------------------


@reducer(collective=False, context=("module",))
def gate_norm(*, module: nn.Module, scale: float = 1.0) -> Any:
    weight = module.get_parameter("moe.gate.weight")
    return lambda tensors: {"norm": scale * float(weight.detach().norm()), "k": tensors["topk_idx"].shape[-1]}


def test_a_custom_metric_is_a_health_row_per_visit(tmp_path: Path) -> None:
    model = make()
    mine = {**plan(), "core.0": Capture(reducers=[gate_norm(scale=2.0)])}
    with attach(model, tmp_path, plan=mine):
        train_step(model)
    found = [row for row in rows(tmp_path, "health") if row["event"] == "custom:gate_norm.norm"]
    assert [row["unrolled_pos"] for row in found] == [1, 3, 5]
    assert found[0]["value"] == pytest.approx(2 * float(model.core[0].moe.gate.weight.detach().norm()))


def test_a_model_with_the_contract_records_itself(tmp_path: Path) -> None:
    model = ToyLoopMoE(vocab_size=32)
    with attach(model, tmp_path, plan=None):
        logits, lb, z = model(ids())
        (logits.square().mean() + lb + z).backward()
    assert len(rows(tmp_path, "router")) == len(model.expected_visits())
    with pytest.raises(PlanError, match="would record them twice"):
        attach(model, tmp_path, plan={"stack.0": BLOCK})


def test_a_resume_goes_on_with_the_steps_before_it(tmp_path: Path) -> None:
    with attach(make(), tmp_path, every=1) as run:
        for seed in range(4):
            train_step(run.adapter.model, seed=seed)
    with attach(make(), tmp_path, every=1, resume=True, first_step=3) as run:
        train_step(run.adapter.model, seed=9)
    found = {(row["step"], row["attempt"]) for row in rows(tmp_path, "router")}
    assert found == {(1, 1), (2, 1), (3, 2)}
