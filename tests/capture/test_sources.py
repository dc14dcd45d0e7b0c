"""What a source can name, and what becomes of values that are no plain tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

import loopscope
from loopscope.capture import PlanError, ReconcileError
from loopscope.capture.source import Call, parse_source
from loopscope.capture.values import plain_tensor

ONE, TWO = torch.ones(2), torch.zeros(3)
CALL = Call(
    nn.Linear(2, 2),
    (ONE, [TWO, ONE]),
    {"mask": ONE, "extra": {"a.b-c": TWO}},
    {"h": ONE, "items": TWO, "nested": {"x": [ONE, TWO]}, "named": SimpleNamespace(y=TWO)},
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("output.h", ONE),
        ("output[h]", ONE),
        ("output['h']", ONE),
        ('output["h"]', ONE),
        ("output.items", TWO),
        ("output.nested.x[-1]", TWO),
        ("output[nested][x][0]", ONE),
        ("output.named.y", TWO),
        ("input[0]", ONE),
        ("input[-1][0]", TWO),
        ("kwarg.mask", ONE),
        ("kwarg.extra[a.b-c]", TWO),
    ],
)
def test_a_source_names_a_value(text: str, expected: Tensor) -> None:
    assert parse_source(text, "plan").read(CALL) is expected


def test_a_missing_key_names_the_keys_that_are_there() -> None:
    with pytest.raises(
        ReconcileError, match=r"keys \['h', 'items', 'named', 'nested'\] has no attribute 'hidden'"
    ):
        parse_source("output.hidden", "plan").read(CALL)


@pytest.mark.parametrize("text", ["output[", "output[']", "output.", "output[a b]", "output['a\"]", "result"])
def test_what_is_no_source_is_refused_when_the_plan_is_made(text: str) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        parse_source(text, "plan")


class Tagged(Tensor):
    pass


class Placed(Tensor):
    """As much of a DTensor as the check reads, without a process group."""

    placements: Any = ()

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_values_become_plain_tensors() -> None:
    assert type(plain_tensor(ONE.as_subclass(Tagged), "x")) is Tensor
    for layout in (torch.jagged, torch.strided):
        ragged = torch.nested.nested_tensor([torch.zeros(1, 4), torch.ones(2, 4)], layout=layout)
        assert plain_tensor(ragged, "x").sum(-1).tolist() == [0.0, 4.0, 4.0]
    assert not plain_tensor(torch.ones(2, requires_grad=True) * 2, "x").requires_grad
    placed = torch.ones(2, 3).as_subclass(Placed)
    placed.placements = (SimpleNamespace(is_partial=lambda: False, is_shard=lambda: True, dim=0),)
    assert type(plain_tensor(placed, "x")) is Tensor


def test_values_that_cannot_be_read_are_named_with_the_fix() -> None:
    with pytest.raises(ReconcileError, match="meta device"):
        plain_tensor(torch.ones(2, device="meta"), "expert_bias")
    with pytest.raises(ReconcileError, match=r"dict with keys \['a'\]"):
        plain_tensor({"a": ONE}, "residual")
    with pytest.raises(ReconcileError, match="expected a dense tensor"):
        plain_tensor(torch.eye(2).to_sparse(), "router_logits")
    placed = torch.ones(2, 3).as_subclass(Placed)
    placed.placements = (SimpleNamespace(is_partial=lambda: True, is_shard=lambda: False),)
    with pytest.raises(ReconcileError, match="partial sums"):
        plain_tensor(placed, "residual")
    placed.placements = (SimpleNamespace(is_partial=lambda: False, is_shard=lambda: True, dim=-1),)
    with pytest.raises(ReconcileError, match="last dimension is sharded"):
        plain_tensor(placed, "residual")


class Biased(nn.Module):
    """A block with its router inside, whose choice is steered by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        nn.init.normal_(self.gate.weight)
        self.register_buffer("bias", torch.tensor([0.0, 1.0, -1.0, 0.5]))
        self.counted: list[list[int]] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x)
        idx = (logits.sigmoid() + self.bias).topk(2, -1).indices
        self.counted.append(torch.bincount(idx.flatten(), minlength=4).tolist())
        return x * 2, logits, idx


PLAN = {
    "block": {
        "tensors": {
            "residual": "output[0]",
            "router_logits": "output[1]",
            "topk_idx": "output[2]",
            "expert_bias": "module.bias",
        },
        "placements": {},
        "merge": "sum",
        "routing": {
            "num_experts": 4, "top_k": 2, "score_func": "sigmoid", "order": "score_then_topk", "normalised": True,
            "balancing": "probability_bias",
        },
    }
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Biased()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)[0]
        return out


def rows_of(model: nn.Module, out: Path, x: Tensor, **options: Any) -> list[dict[str, Any]]:
    with loopscope.attach(model.train(), out=out, plan=PLAN, on_error="raise", **options) as run:
        model(x)
        run.log_loss(1.0)
    found: list[dict[str, Any]] = loopscope.open_run(out).arrow("router").to_pylist()
    return found


def test_an_offloaded_bias_is_read_where_it_lies(tmp_path: Path) -> None:
    model = Net()
    counted = model.block.counted
    model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    assert model.block.bias.device.type == "meta"
    rows = rows_of(model, tmp_path / "run", torch.randn(2, 6, 8))
    assert [row["expert_count"] for row in rows] == counted


def test_flat_tokens_take_the_mask_of_their_batch(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(12, 8)
    mask = torch.arange(12).reshape(2, 6) % 6 < 4
    rows = rows_of(model, tmp_path / "run", x, valid=lambda args, kwargs: mask)
    kept = Net()
    kept(x[mask.reshape(-1)])
    assert [row["expert_count"] for row in rows] == kept.block.counted
    assert rows[0]["num_tokens"] == 8


def test_an_empty_batch_adds_nothing(tmp_path: Path) -> None:
    model = Net()
    with loopscope.attach(
        model.train(), out=tmp_path / "run", plan=PLAN, num_microbatches=2, on_error="raise"
    ) as run:
        model(torch.randn(0, 6, 8))
        model(torch.randn(2, 6, 8))
        run.log_loss(1.0)
    rows = loopscope.open_run(tmp_path / "run").arrow("router").to_pylist()
    assert [row["expert_count"] for row in rows] == model.block.counted[1:]
    assert rows[0]["num_tokens"] == 12


def test_a_residual_without_tokens_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReconcileError, match=r"expected floats \[B, S, d\]"):
        rows_of(Net(), tmp_path / "run", torch.randn(1, 2, 6, 8))
