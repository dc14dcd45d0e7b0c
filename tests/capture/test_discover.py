"""`discover`: models of one's own, their plan from one forward, and what stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import loopscope
from loopscope.capture.files import parse_overrides
from loopscope.errors import ConfigError

WIDTH, EXPERTS = 16, 6


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("balance", torch.randn(EXPERTS) * 0.1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
        logits = self.gate(x)
        scores = logits.sigmoid()
        idx = (scores + self.balance).topk(2, -1).indices
        weights = scores.gather(-1, idx)
        return logits, idx, weights / weights.sum(-1, keepdim=True)


class Moe(nn.Module):
    """Experts in a plain list, each called with its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        _, idx, weights = self.router(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (idx == number).nonzero(as_tuple=True)
            if len(token):
                out[token] += weights[token, place, None] * expert(flat[token])
        return out.reshape(x.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), Moe()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


class Looped(nn.Module):
    """Prelude, a core of two blocks three times, coda; a buffer and a number that count forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, WIDTH)
        self.prelude, self.coda = Block(), Block()
        self.core = nn.ModuleList([Block(), Block()])
        self.again = self.coda
        self.forwards = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self.seen += 1
        h = self.prelude(self.embed(ids))
        for _ in range(3):
            for block in self.core:
                h = block(h)
        return self.coda(h + torch.rand(()))


def ids() -> torch.Tensor:
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))


def expert_rows(model: Looped, given: torch.Tensor) -> list[list[int]]:
    """Tokens that each expert was called with, per call of a MoE, by hooks on the experts alone."""
    calls: list[list[int]] = []
    handles = []
    for moe in model.modules():
        if isinstance(moe, Moe):
            handles.append(moe.register_forward_pre_hook(lambda *_: calls.append([0] * EXPERTS)))
            for number, expert in enumerate(moe.experts):
                handles.append(
                    expert.register_forward_pre_hook(
                        lambda module, args, number=number: calls[-1].__setitem__(number, len(args[0]))
                    )
                )
    model(given).square().mean().backward()
    for handle in handles:
        handle.remove()
    return calls


def test_a_looped_model_of_ones_own(tmp_path: Path) -> None:
    model = Looped().train()
    found = loopscope.discover(model, (ids(),))
    assert found.plan is not None, found.missing
    assert {name: spec.calls for name, spec in found.plan.blocks().items()} == {
        "prelude": 1, "core.0": 3, "core.1": 3, "coda": 1
    }  # fmt: skip
    routing = found.plan["core.0.moe.router"].routing
    assert routing is not None
    assert (routing.num_experts, routing.top_k, routing.score_func) == (EXPERTS, 2, "sigmoid")
    assert routing.normalised
    assert found.plan["core.0.moe.router"].tensors["expert_bias"] == "module.balance"
    assert found.shared == {"coda": ["again"]}
    assert "core.1" in str(found)
    # The YAML is a plan that trains, and its rows are what the experts were called with.
    model.zero_grad()
    with loopscope.attach(
        model, out=tmp_path / "run", plan=parse_overrides(found.yaml()), backend="torch", on_error="raise"
    ) as run:
        expected = expert_rows(model, ids())
        run.log_loss(0.0)
    rows = sorted(
        loopscope.open_run(tmp_path / "run").arrow("router").to_pylist(), key=lambda r: r["unrolled_pos"]
    )
    assert [row["expert_count"] for row in rows] == expected
    assert len(rows) == 8


def test_the_model_is_as_it_was() -> None:
    model = Looped().train()
    model.core[0].eval()
    model(ids()).sum().backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    stream = torch.get_rng_state()
    loopscope.discover(model, ids())
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert model.forwards == 1
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(grads[name], p.grad) for name, p in model.named_parameters() if name in grads)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_wrong_draft_is_not_proven() -> None:
    class Fooling(Router):
        """In a forward with numbers of its own it uses other experts than its scores say."""

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits, idx, weights = super().forward(x)
            return logits, (idx + 1) % EXPERTS if self.gate.weight.requires_grad else idx, weights

    model = Looped()
    for module in model.modules():
        if isinstance(module, Router):
            module.__class__ = Fooling
    found = loopscope.discover(model, ids())
    assert found.plan is None
    assert any("not proven" in each for each in found.missing)
    assert found.yaml() == ""


def test_a_dense_model_says_what_is_missing() -> None:
    found = loopscope.discover(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(2, 3, 4))
    assert found.plan is None
    assert "No router was found" in found.missing[-1]


def test_only_torch_modules() -> None:
    with pytest.raises(ConfigError, match=r"expected a torch\.nn\.Module"):
        loopscope.discover("model", None)  # type: ignore[arg-type]
