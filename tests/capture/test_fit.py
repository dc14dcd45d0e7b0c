"""What copies with random weights give away of a router, and that the model itself is left alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from loopscope.capture.fit.boundaries import routed_units, units_of
from loopscope.capture.fit.unit import Found, examine

WIDTH, EXPERTS = 16, 8


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise AssertionError("experts are never run")


class Block(nn.Module):
    """A router in the words of its flags; weights and biases are zero, as at a cruel initialisation."""

    def __init__(
        self,
        *,
        top_k: int = 2,
        score: str = "softmax",
        late: bool = False,
        norm: bool = True,
        bias: bool = False,
        affine: bool = False,
        scale: float = 1.0,
        groups: bool = False,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=affine)
        nn.init.zeros_(self.gate.weight)
        self.experts = Experts()
        self.top_k, self.score, self.late, self.norm, self.scale = top_k, score, late, norm, scale
        self.many, self.few = (4, 2) if groups else (0, 0)
        self.register_buffer("balance", torch.zeros(EXPERTS) if bias else None)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, WIDTH)
        logits = self.gate(flat)
        by = logits if self.late else self.scores(logits)
        chosen_by = by if self.balance is None else by + self.balance
        if self.many:
            grouped = chosen_by.reshape(len(flat), self.many, -1)
            best = grouped.topk(2, -1).values.sum(-1).topk(self.few, -1).indices
            keep = torch.zeros(len(flat), self.many, dtype=torch.bool).scatter(-1, best, True)
            chosen_by = grouped.masked_fill(~keep[..., None], float("-inf")).flatten(1)
        idx = chosen_by.topk(self.top_k, -1).indices
        weights = self.scores(logits.gather(-1, idx)) if self.late else by.gather(-1, idx)
        if self.norm and not self.late:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(flat, idx, weights * self.scale).reshape(hidden.shape)


def found(block: nn.Module) -> Found:
    (unit,) = units_of({"moe": block, "moe.experts": block.experts})
    return examine(unit, [WIDTH])


CASES: dict[str, dict[str, Any]] = {
    "softmax, normalised": {},
    "softmax, raw": {"norm": False},
    "softmax of the chosen": {"late": True, "affine": True},
    "sigmoid, scaled": {"score": "sigmoid", "scale": 2.5},
    "sigmoid of the chosen": {"score": "sigmoid", "late": True, "norm": False},
    "a bias on sigmoids": {"score": "sigmoid", "bias": True},
    "a bias on logits": {"score": "sigmoid", "bias": True, "late": True, "norm": False},
    "groups": {"score": "sigmoid", "bias": True, "groups": True},
    "k = 1, raw": {"top_k": 1, "norm": False},
    "k = 1, normalised": {"top_k": 1, "score": "sigmoid"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_description_is_found(name: str) -> None:
    flags = {
        "top_k": 2,
        "score": "softmax",
        "late": False,
        "norm": True,
        "bias": False,
        "affine": False,
    } | CASES[name]
    result = found(Block(**CASES[name]))
    assert len(result.fits) == 1, result.why
    (fit,) = result.fits
    assert (fit.spec.num_experts, fit.spec.top_k) == (EXPERTS, flags["top_k"])
    assert fit.spec.score_func == flags["score"]
    assert fit.spec.order == ("topk_then_score" if flags["late"] else "score_then_topk")
    assert fit.spec.order == "topk_then_score" or fit.spec.normalised == flags["norm"]
    assert fit.spec.route_scale == flags.get("scale", 1.0)
    assert fit.spec.grouped == flags.get("groups", False)
    assert ("expert_bias" in fit.tensors) == flags["bias"]
    assert result.gate_bias == flags["affine"]
    assert fit.tensors["router_logits"] == ("gate", "output")
    assert fit.tensors["topk_idx"] == ("experts", "input[1]")


def test_what_k_of_one_leaves_open_is_refused_and_named() -> None:
    block = Block(top_k=1)
    block.top_k = 1.0  # type: ignore[assignment]  # an integer that cannot be raised in the copy
    plain = Block.forward

    class Fixed(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.top_k = 1
            return plain(self, hidden)

    block.__class__ = Fixed
    result = found(block)
    assert {fit.spec.score_func for fit in result.fits} >= {"softmax", "sigmoid"}
    assert "softmax" in result.why
    assert "sigmoid" in result.why


class Table(Block):
    """Experts from a table of token ids."""

    def __init__(self) -> None:
        super().__init__(score="sigmoid")
        self.register_buffer("table", torch.zeros(32, 2, dtype=torch.int64))

    def forward(self, hidden: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        assert input_ids is not None
        flat = hidden.reshape(-1, WIDTH)
        idx = self.table[input_ids.reshape(-1)]
        weights = self.scores(self.gate(flat)).gather(-1, idx)
        return self.experts(flat, idx, weights / weights.sum(-1, keepdim=True)).reshape(hidden.shape)


class Scaled(Block):
    """A learned factor for each expert; the scores are handed over by a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(EXPERTS))
        self.soft = nn.Softmax(dim=-1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, WIDTH)
        weights, idx = self.soft(self.gate(flat)).topk(self.top_k, -1)
        return self.experts(flat, idx, weights * self.factor[idx]).reshape(hidden.shape)


class Shared(Block):
    """A weight shared with something else, so that those of the experts sum to less than 1."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, WIDTH)
        scores = self.gate(flat).sigmoid()
        weights, idx = scores.topk(self.top_k, -1)
        weights = weights / (weights.sum(-1, keepdim=True) + flat[:, :1].sigmoid())
        return self.experts(flat, idx, weights).reshape(hidden.shape)


def test_stranger_routers_are_said_as_they_are() -> None:
    table, scaled, shared = (found(block).fits for block in (Table(), Scaled(), Shared()))
    assert [(fit.spec.choice, fit.spec.score_func, fit.spec.normalised) for fit in table] == [
        ("given", "sigmoid", True)
    ]
    assert [(fit.spec.weights, fit.spec.score_func, fit.tensors["router_probs"]) for fit in scaled] == [
        ("own", "softmax", ("soft", "output"))
    ]
    assert [(fit.spec.weights, fit.spec.score_func) for fit in shared] == [("proportional", "sigmoid")]


def test_experts_that_compute_nothing_are_told_apart() -> None:
    block = Block()
    block.experts.down = nn.Parameter(torch.zeros(EXPERTS - 2, WIDTH, WIDTH))
    (fit,) = found(block).fits
    assert (fit.spec.num_experts, fit.spec.null_experts) == (EXPERTS - 2, 2)


def test_weights_that_nothing_explains_are_refused() -> None:
    class Odd(Block):
        def scores(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.softmax(-1) ** 1.7

    result = found(Odd(norm=False))
    assert result.routes
    assert not result.fits
    assert "no description" in result.why


def test_the_model_and_the_random_streams_are_left_alone() -> None:
    class Jittered(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            torch.rand(3)
            random.random()
            hidden *= 1.0
            return super().forward(hidden)

    block = Jittered(bias=True, score="sigmoid").eval()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    calls: list[int] = []
    block.register_forward_hook(lambda *given: calls.append(1))
    torch.manual_seed(3)
    random.seed(3)
    streams = torch.get_rng_state(), random.getstate()
    assert len(found(block).fits) == 1
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert not block.training
    assert not calls
    assert all(torch.equal(before[name], tensor) for name, tensor in block.state_dict().items())


def test_units_of_one_kind_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.ModuleList([Block(), Block(), Block(top_k=3)])
    modules = {f"layers{'.' if name else ''}{name}": module for name, module in layers.named_modules()}
    examined: list[str] = []

    def counted(unit: Any, widths: Any) -> Found:
        examined.append(unit.name)
        return examine(unit, widths)

    monkeypatch.setattr("loopscope.capture.fit.boundaries.examine", counted)
    routed, unknown = routed_units(units_of(modules), lambda name: [WIDTH])
    assert examined == ["layers.0", "layers.2"]
    assert [routed[f"layers.{number}"].fits[0].spec.top_k for number in range(3)] == [2, 2, 3]
    assert not unknown


def test_a_model_without_numbers_can_be_examined() -> None:
    with torch.device("meta"):
        block = Block(bias=True, score="sigmoid")
    assert found(block).fits[0].spec.score_func == "sigmoid"
