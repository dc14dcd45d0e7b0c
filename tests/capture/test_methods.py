"""A method as a boundary: seen when the model calls it, and nothing else changed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loopscope
from loopscope.capture import method_boundary
from loopscope.errors import ConfigError


class Chooser(nn.Module):
    """Chooses in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mix = nn.Linear(8, 4, bias=False), nn.Linear(8, 8)
        nn.init.normal_(self.gate.weight)
        self.counts: list[list[int]] = []

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, idx = logits.softmax(-1).topk(2)
        return idx, weights

    def forward(self, h: Tensor) -> Tensor:
        idx, weights = self.route(self.gate(h))
        self.counts.append(torch.bincount(idx.flatten(), minlength=4).tolist())
        return self.mix(h) * weights.sum(-1, keepdim=True)


class Recurrent(nn.Module):
    """Updates its state in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = Chooser()
        self.norms: list[float] = []

    def step(self, h: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        force = self.moe(h)
        h = h + scale * force
        self.norms.append(h.detach().norm(dim=-1).mean().item())
        return h, force

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x, _ = self.step(x, scale=0.5)
        return x


ROUTING = {
    "num_experts": 4, "top_k": 2, "score_func": "softmax", "order": "score_then_topk", "normalised": False,
    "balancing": "none",
}  # fmt: skip
HERE = {"placements": {}, "merge": "sum"}


def build() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent().train()


def rows(model: Recurrent, plan: dict[str, Any], out: Path) -> tuple[list[Any], list[Any]]:
    with loopscope.attach(model, out=out, plan=plan, on_error="raise"):
        model(torch.randn(2, 5, 8)).sum().backward()
    run = loopscope.open_run(out)
    return run.arrow("router").to_pylist(), run.arrow("residual").to_pylist()


def test_a_choice_made_in_a_method(tmp_path: Path) -> None:
    model = build()
    method_boundary(model.moe, "route")
    plan = {
        "moe": {**HERE, "tensors": {"residual": "output"}, "calls": 3},
        "moe.route": {
            **HERE, "routing": ROUTING,
            "tensors": {"router_logits": "input[0]", "topk_idx": "output[0]", "topk_weights": "output[1]"},
        },
    }  # fmt: skip
    router, _ = rows(model, plan, tmp_path / "run")
    assert [row["expert_count"] for row in router] == model.moe.counts
    assert [row["loop_step"] for row in router] == [0, 1, 2]


def test_a_state_updated_in_a_method(tmp_path: Path) -> None:
    model = build()
    method_boundary(model, "step")
    plan = {"step": {**HERE, "tensors": {"residual": "output[0]"}, "calls": 3}}
    _, residual = rows(model, plan, tmp_path / "run")
    assert [row["norm_mean"] for row in residual] == pytest.approx(model.norms)


def test_the_model_is_as_before() -> None:
    model, plain, x = build(), build(), torch.randn(2, 5, 8)
    for _ in range(2):  # a second call changes nothing
        method_boundary(model, "step")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(model(x), plain(x))


def test_copies_call_themselves() -> None:
    model, x = build(), torch.randn(1, 2, 8)
    method_boundary(model, "step")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.moe.mix.weight.zero_()
            other.moe.mix.bias.zero_()
        assert torch.equal(other(x), x)
        assert not torch.equal(model(x), x)


@pytest.mark.parametrize("name", ["stepp", "moe"])
def test_what_is_no_method_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no method '{name}'"):
        method_boundary(build(), name)
