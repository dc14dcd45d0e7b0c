"""Which steps an attached model's forwards belong to, and what is said where nothing came."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_models import Recurrent, ids, make, plan, train_step

import loopscope
from loopscope.errors import ConfigError, TraceError


def attach(model: Any, out: Path, **changes: Any) -> Any:
    return loopscope.attach(model, out=out / "run", **{"plan": plan(), "every": 1, **changes})


def rows(out: Path, table: str = "router") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = loopscope.open_run(out / "run").arrow(table).to_pylist()
    return found


def steps(out: Path) -> dict[int, int]:
    """Step → its microbatches."""
    return {row["step"]: row["num_microbatches"] for row in rows(out)}


def critical(out: Path) -> list[tuple[int, str]]:
    return [(r["step"], r["event"]) for r in rows(out, "health")
            if r["severity"] == "critical" and r["event"] != "alert"]  # fmt: skip


def test_an_optimizers_update_ends_a_step(tmp_path: Path) -> None:
    model = make()
    optimizers = [
        torch.optim.SGD(model.core.parameters(), 0.01),
        torch.optim.AdamW(model.prelude.parameters()),
    ]
    with attach(model, tmp_path, optimizer=optimizers, on_error="raise"):
        for group in (3, 1, 2):
            for _ in range(group):
                train_step(model)
            for optimizer in optimizers:
                optimizer.step()
    assert steps(tmp_path) == {1: 3, 2: 1, 3: 2}
    assert not optimizers[0]._optimizer_step_post_hooks


def test_the_forwards_of_a_closure_are_one_step(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.LBFGS(model.coda.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ids()).square().mean()
        loss.backward()
        calls.append(1)
        return loss

    with attach(model, tmp_path, optimizer=optimizer, on_error="raise"):
        for _ in range(2):
            calls: list[int] = []
            optimizer.step(closure)
            seen = len(calls)
    assert set(steps(tmp_path)) == {1, 2}
    assert steps(tmp_path)[2] == seen > 1


def test_a_wrapped_optimizer_is_looked_into_and_something_else_is_refused(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = make()
    inner = torch.optim.SGD(model.parameters(), 0.01)
    with attach(model, tmp_path, optimizer=Wrapper(Wrapper(inner))):
        train_step(model)
        train_step(model)
        inner.step()
    assert steps(tmp_path) == {1: 2}
    for wrong in (object(), []):
        with pytest.raises(ConfigError, match="optimizer"), attach(make(), tmp_path / "b", optimizer=wrong):
            pass


def test_the_whole_model_under_recompute_is_one_forward_a_step(tmp_path: Path) -> None:
    model = make()
    with attach(model, tmp_path, on_error="raise"):
        for _ in range(3):
            torch.utils.checkpoint.checkpoint(model, ids(), use_reentrant=False).square().mean().backward()
    assert steps(tmp_path) == {1: 1, 2: 1, 3: 1}


def test_losses_of_forwards_that_belong_to_no_step_are_not_added(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(
        hf.MixtralConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=32, num_local_experts=4)
    ).train()  # fmt: skip
    tokens = ids()
    with loopscope.attach(model, out=tmp_path / "run", every=1, on_error="raise") as run:
        run.begin_step(1, num_microbatches=1)
        first = float(model(input_ids=tokens, labels=tokens).loss.detach())
        model(input_ids=tokens.flip(0, 1), labels=tokens)
        run.end_step()
        run.log_step(1, grad_norm=0.5)
    (row,) = rows(tmp_path, "loss")
    assert row["total_loss"] == pytest.approx(first, rel=1e-6)
    assert row["grad_norm"] == 0.5


def inner_forward(model: Recurrent) -> None:
    model.forward(ids()).square().mean().backward()


def in_eval_mode(model: Recurrent) -> None:
    model.eval()
    model(ids())
    model.train()


NOTHING = {"forward": inner_forward, "eval": in_eval_mode}


@pytest.mark.parametrize("name", NOTHING)
def test_a_step_that_saw_no_training_forward_is_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body: Callable[[Recurrent], None] = NOTHING[name]
    with caplog.at_level(logging.WARNING), attach(make(), tmp_path) as run:
        body(run.adapter.model)
    assert critical(tmp_path) == [(1, "no_trace")]
    assert "no training forward was seen" in caplog.text
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with attach(model, tmp_path / "at-once", optimizer=optimizer):
        body(model)
        optimizer.step()
        assert critical(tmp_path / "at-once") == [(1, "no_trace")]  # while training goes on
        train_step(model)
    assert set(steps(tmp_path / "at-once")) == {2}
    with pytest.raises(TraceError, match="no training forward"), attach(
        make(), tmp_path / "raise", on_error="raise"
    ) as run:  # fmt: skip
        body(run.adapter.model)


def test_a_training_that_fails_ends_with_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), attach(make(), tmp_path, on_error="raise"):
        raise ZeroDivisionError
    assert critical(tmp_path) == []


def test_what_breaks_inside_a_hook_costs_the_trace_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loopscope.capture.source import DECODERS

    monkeypatch.setitem(DECODERS, "test_broken", lambda module, output: output.nowhere)
    broken = plan()
    broken["*.moe"]["tensors"] = {**broken["*.moe"]["tensors"], "topk_weights": "decode.test_broken"}
    twin, model = make(), make()
    train_step(twin)
    with attach(model, tmp_path, plan=broken):
        train_step(model)
    assert critical(tmp_path) == [(1, "capture_failed")]
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad) if mine.grad is not None else other.grad is None
