"""Local variables of a forward as sources: what they were at its return, and no trace left of looking."""

from __future__ import annotations

import cProfile
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopscope
from loopscope.capture import PlanError


class Moe(nn.Module):
    """A choice that nobody is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        nn.init.normal_(self.router.weight)
        self.register_buffer("bias", torch.tensor([0.0, 2.0, -2.0, 0.5]))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        topk_idx = torch.zeros(1)
        flat = x.flatten(0, 1)
        logits = self.router(flat)
        _, topk_idx = (logits + self.bias).topk(2)
        if self.broken:
            raise ValueError("out of memory")
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (topk_idx == number).any(-1)
            out[rows] = out[rows] + expert(flat[rows])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe, self.inner = Moe(), Moe()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.moe(x))


ROUTING = {
    "num_experts": 4, "top_k": 2, "score_func": "softmax", "order": "topk_then_score", "normalised": True,
    "balancing": "probability_bias",
}  # fmt: skip
PLAN: dict[str, Any] = {
    f"{name}": {
        "tensors": {
            "residual": "output", "router_logits": "local.logits", "topk_idx": "local.topk_idx",
            "expert_bias": "module.bias",
        },
        "placements": {}, "merge": "sum", "routing": ROUTING,
    }
    for name in ("moe", "inner")
}  # fmt: skip


def build() -> Block:
    torch.manual_seed(0)
    return Block().train()


def counted(model: Block) -> list[int]:
    """Counts of both, by what their experts are handed."""
    seen = [0] * 8
    for base, moe in ((0, model.moe), (4, model.inner)):
        for number, expert in enumerate(moe.experts):

            def hook(module: nn.Module, args: Any, at: int = base + number) -> None:
                seen[at] += len(args[0])

            expert.register_forward_pre_hook(hook)
    return seen


def test_the_choice_of_two_routers_of_one_class(tmp_path: Path) -> None:
    model, seen = build(), []
    seen = counted(model)
    with loopscope.attach(model, out=tmp_path / "run", plan=PLAN, on_error="raise"):
        model(torch.randn(2, 6, 8)).sum().backward()
    assert sys.getprofile() is None
    rows = loopscope.open_run(tmp_path / "run").arrow("router").to_pylist()
    assert [count for row in rows for count in row["expert_count"]] == seen
    assert not any(
        module._forward_pre_hooks for module in model.modules() if not isinstance(module, nn.Linear)
    )


def test_a_forward_that_raises_leaves_no_profiler(tmp_path: Path) -> None:
    model = build()
    model.inner.broken = True
    with loopscope.attach(model, out=tmp_path / "run", plan=PLAN):
        with pytest.raises(ValueError, match="out of memory"):
            model(torch.randn(1, 2, 8))
        assert sys.getprofile() is None


def test_a_profiler_at_work_is_left_alone(tmp_path: Path) -> None:
    model = build()
    profiler = cProfile.Profile()
    with loopscope.attach(model, out=tmp_path / "run", plan=PLAN):
        profiler.enable()
        model(torch.randn(1, 2, 8)).sum().backward()
        assert sys.getprofile() is profiler
        profiler.disable()
    events = loopscope.open_run(tmp_path / "run").arrow("health").to_pylist()
    said = [row["detail"] for row in events if row["event"] == "capture_failed"]
    assert any("another profiler" in detail for detail in said)


def test_a_python_profiler_sees_the_same_calls(tmp_path: Path) -> None:
    def calls(trace: bool) -> list[str]:
        model, names = build(), []

        def see(frame: Any, event: str, value: Any) -> None:
            if event == "call" and frame.f_code.co_filename == __file__:
                names.append(frame.f_code.co_qualname)

        with loopscope.attach(
            model, out=tmp_path / str(trace), plan=PLAN, every=1 if trace else 0, on_error="raise"
        ):
            sys.setprofile(see)
            try:
                model(torch.randn(1, 2, 8))
            finally:
                sys.setprofile(None)
        return names

    assert calls(True) == calls(False)


def test_a_misspelt_variable_is_refused_before_training(tmp_path: Path) -> None:
    plan = {"moe": {**PLAN["moe"], "tensors": {**PLAN["moe"]["tensors"], "topk_idx": "local.topk_index"}}}
    with pytest.raises(PlanError, match=r"Moe.forward has no variable 'topk_index'. Did you mean 'topk_idx'"):
        loopscope.attach(build(), out=tmp_path, plan=plan)
