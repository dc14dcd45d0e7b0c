"""What cannot be observed is named with what to do about it: by an error before training, or by a critical event of a
training that goes on as if nobody had looked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_models import BLOCK, ROUTER, ROUTER_TENSORS, ROUTING, Block, Mixture, Recurrent, ids, make, plan
from torch import Tensor, nn

import loopscope
from loopscope.capture import PlanError
from loopscope.capture.source import DECODERS

STEPS = 3
Build = Callable[[], Recurrent]
Change = Callable[[Recurrent, int], Any]


def untouched(model: Recurrent, step: int) -> None:
    pass


def train(
    model: Recurrent, run: Any = None, change: Change = untouched, batch: Callable[[int], Tensor] = ids
) -> list[str]:
    """Every loss, bit for bit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        change(model, step)
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append("" if loss.is_meta else float(loss.detach()).hex())
    return losses


def observed(
    out: Path, build: Build = make, change: Change = untouched, batch: Any = ids, **options: Any
) -> Any:
    """The run of a training that ended as it does without loopscope."""
    model = build()
    with loopscope.attach(model, out=out / "run", **{"plan": plan(), **options}) as run:
        losses = train(model, run, change, batch)
    assert losses == train(build(), None, change, batch)
    return loopscope.open_run(out / "run")


def traced_steps(run: Any) -> set[int]:
    return {
        row["step"] for table in ("router", "residual", "transition") for row in run.arrow(table).to_pylist()
    }


def told(run: Any, event: str) -> dict[int, str]:
    """Critical events of a name: step → detail."""
    return {
        row["step"]: row["detail"]
        for row in run.arrow("health").to_pylist()
        if (row["event"], row["severity"]) == (event, "critical")
    }


def one_block(**tensors: str) -> dict[str, Any]:
    return {**plan(), "core.?": {**BLOCK, "calls": 3, "tensors": tensors}}


def one_router(**changes: str) -> dict[str, Any]:
    return {**plan(), "*.moe": {**ROUTER, "tensors": {**ROUTER_TENSORS, **changes}}}


def routing(**changes: Any) -> dict[str, Any]:
    return {**plan(), "*.moe": {**ROUTER, "routing": {**ROUTING, **changes}}}


# -- before training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (routing(top_k=7), r"top_k=7, num_experts=6; expected 1 <= top_k <= num_experts"),
        (routing(top_k=0), r"expected 1 <= top_k <= num_experts"),
        (routing(num_experts="6"), r"num_experts is '6', expected an integer"),
        (
            {**plan(), "core.7": dict(BLOCK)},
            r"plan\['core.7'\]: the model has no module of this name. Did you mean",
        ),
        ({**plan(), "cor.?": dict(BLOCK)}, r"the glob matches no module. Did you mean"),
        ({"*.moe": dict(ROUTER)}, r"a router outside every block.*Add the layer it belongs to"),
        (one_block(residual="outptu"), r"outptu.*expected"),
    ],
    ids=["k>E", "k=0", "E is text", "no module", "no match", "no block", "no source"],
)
def test_a_wrong_plan_is_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        loopscope.attach(make(), out=tmp_path / "run", plan=wrong)
    assert not (tmp_path / "run").exists()


class Deep(nn.Module):
    """Twelve layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(12))


def test_a_glob_that_covers_ten_of_twelve_layers_is_named(tmp_path: Path) -> None:
    short = {"layers.?": dict(BLOCK)}
    with pytest.warns(
        UserWarning, match=r"covers 10 of 12 .* leaves out layers.10, layers.11. Widen the glob"
    ):
        loopscope.attach(Deep(), out=tmp_path / "run", plan=short)


# -- in training: no rows, and a critical event ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            lambda module, output: output[:, :, None],
            r"residual is torch.float32 \(2, 8, 1, 16\), expected floats",
        ),
        (lambda module, output: output.flatten(), r"residual is torch.float32 \(256,\), expected floats"),
        (lambda module, output: output.long(), r"residual is torch.int64 \(2, 8, 16\), expected floats"),
        (lambda module, output: output > 0, r"residual is torch.bool \(2, 8, 16\), expected floats"),
        (
            lambda module, output: (output, output),
            r"residual is a tuple of 2, expected a tensor; add \[index\]",
        ),
        (lambda module, output: None, r"residual is NoneType, expected a tensor"),
        (lambda module, output: output.to("meta"), r"residual is on the meta device.*Load the weights"),
        (
            lambda module, output: output.detach().to_sparse(),
            r"residual is torch.sparse_coo, expected a dense",
        ),
        (
            lambda module, output: output[:, :-1],
            r"the router saw 16 tokens, the block's output has \(2, 7\) = 14",
        ),
        (lambda module, output: 1 // 0, r"core.0: ZeroDivisionError"),
    ],
    ids=["4-D", "1-D", "integers", "bool", "tuple", "None", "meta", "sparse", "fewer tokens", "raises"],
)
def test_a_residual_of_another_kind(tmp_path: Path, decoder: Any, message: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(DECODERS, "test_bad", decoder)
    run = observed(tmp_path, plan=one_block(residual="decode.test_bad"))
    assert traced_steps(run) == set()
    assert [*told(run, "capture_failed")] == [1, 2, 3]
    assert re.search(message, told(run, "capture_failed")[1])


@pytest.mark.parametrize(
    ("tensor", "decoder", "message"),
    [
        (
            "topk_idx",
            lambda module, output: output[1][2] + 100,
            "indices that are not 2 distinct experts of 6",
        ),
        ("topk_idx", lambda module, output: output[1][2] - 1, "indices that are not 2 distinct experts of 6"),
        ("topk_idx", lambda module, output: output[1][2][..., :1].expand(2, 8, 2), "2 distinct experts of 6"),
        (
            "topk_idx",
            lambda module, output: output[1][2][:, 1:],
            r"topk_idx is \(14, 2\), expected \(16, 2\)",
        ),
        (
            "topk_idx",
            lambda module, output: output[1][2].float(),
            "topk_idx is torch.float32, expected integers",
        ),
        (
            "router_logits",
            lambda module, output: output[1][0][:, 1:],
            "router saw 14 tokens, the block's output",
        ),
        (
            "router_logits",
            lambda module, output: output[1][0][..., 1:],
            r"is \(16, 5\), expected \[tokens, 6\]",
        ),
        (
            "router_logits",
            lambda module, output: output[1][0].roll(1, -1),
            "not the top 2 of the captured scores",
        ),
        ("topk_weights", lambda module, output: output[1][1] * 2, "weights or scores that do not follow"),
    ],
)
def test_a_router_that_hands_over_something_else(
    tmp_path: Path, tensor: str, decoder: Any, message: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(DECODERS, "test_bad", decoder)
    run = observed(tmp_path, plan=one_router(**{tensor: "decode.test_bad"}))
    assert traced_steps(run) == set()
    assert [*told(run, "capture_failed")] == [1, 2, 3]
    assert re.search(message, told(run, "capture_failed")[1])


def test_a_block_that_nobody_calls(tmp_path: Path) -> None:
    def build() -> Recurrent:
        model = make()
        model.unused = nn.Linear(16, 16)
        return model

    run = observed(tmp_path, build, plan={**plan(), "unused": dict(BLOCK)})
    (detail,) = {
        row["detail"] for row in run.arrow("health").to_pylist() if "unused" in (row["detail"] or "")
    }
    assert re.search("were not called, or their hooks did not run: unused", detail)
    coverage = [row for row in run.arrow("health").to_pylist() if row["event"] == "coverage"]
    assert [(row["step"], row["severity"]) for row in coverage] == [(1, "warn"), (2, "warn"), (3, "warn")]


class Fewer(Mixture):
    """A router with another number of experts than the others."""

    def forward(self, x: Tensor) -> Any:
        mixed, (logits, weights, idx) = super().forward(x)
        return mixed, (logits[..., :5], weights, idx)


class Twice(Block):
    """Calls its router twice, for tokens of two kinds."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        first = x + self.moe(self.norm(x))[0]
        return first + self.moe(self.norm(first))[0]


def with_second(kind: type[nn.Module], part: str = "core.1") -> Build:
    def build() -> Recurrent:
        model = make()
        torch.manual_seed(3)
        model.set_submodule(part, kind())
        return model

    return build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (with_second(Fewer, "core.1.moe"), r"core.1 .*router_logits is \(16, 5\), expected \[tokens, 6\]"),
        (with_second(Twice), "core.1.moe: its router ran twice in one call of 'core.1'"),
    ],
    ids=["another E", "twice"],
)
def test_one_block_that_routes_otherwise(tmp_path: Path, build: Build, message: str) -> None:
    run = observed(tmp_path, build)
    assert traced_steps(run) == set()
    assert [*told(run, "capture_failed")] == [1, 2, 3]
    assert re.search(message, told(run, "capture_failed")[1])


@pytest.mark.parametrize(
    ("valid", "message"),
    [
        (lambda args, kwargs: torch.ones(2, 9).bool(), r"valid= gave \[2, 9\], expected \[B, S\] = \[2, 8\]"),
        (lambda args, kwargs: torch.ones(8, 2).bool(), r"valid= gave \[8, 2\], expected \[B, S\] = \[2, 8\]"),
        (
            lambda args, kwargs: torch.zeros(2, 8),
            r"valid= gave torch.float32, expected bool.*return mask == 0",
        ),
        (
            lambda args, kwargs: kwargs["mask"],
            r"valid= raised KeyError: 'mask'. It is called with the forward's",
        ),
        (lambda args, kwargs: "left", r"valid= gave str, expected \[B, S\]"),
    ],
    ids=["longer", "swapped", "added to scores", "raises", "text"],
)
def test_a_mask_that_does_not_fit(tmp_path: Path, valid: Any, message: str) -> None:
    run = observed(tmp_path, valid=valid)
    assert traced_steps(run) == set()
    assert [*told(run, "capture_failed")] == [1, 2, 3]
    assert re.search(message, told(run, "capture_failed")[1])


def test_a_model_without_weights(tmp_path: Path) -> None:
    def build() -> Recurrent:
        with torch.device("meta"):
            return make()

    run = observed(tmp_path, build, batch=lambda step: ids(step).to("meta"))
    assert traced_steps(run) == set()
    assert [*told(run, "capture_failed")] == [1, 2, 3]
    assert re.search("is on the meta device.*Load the weights", told(run, "capture_failed")[1])


# -- the model changes under way ---------------------------------------------------------------------------------------


def remove(model: Recurrent, step: int) -> None:
    if step == 2:
        model.core = model.core[:1]


def add(model: Recurrent, step: int) -> None:
    if step == 2:
        model.core.append(Block())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, "the model has no module 'core.1.*' any more.*before attaching"),
        (add, "core.2 came to the model beside the blocks that are captured.*before attaching"),
    ],
    ids=["removed", "added"],
)
def test_a_layer_that_comes_or_goes_after_attaching(tmp_path: Path, change: Change, message: str) -> None:
    run = observed(tmp_path, change=change)
    assert traced_steps(run) == {1}
    assert [*told(run, "capture_failed")] == [2, 3]
    assert re.search(message, told(run, "capture_failed")[2])


def test_other_modules_may_come_after_attaching(tmp_path: Path) -> None:
    def adapted(model: Recurrent, step: int) -> None:
        if step == 2:
            model.core[0].norm = nn.Sequential(model.core[0].norm, nn.Identity())  # type: ignore[assignment]

    run = observed(tmp_path, change=adapted)
    assert traced_steps(run) == {1, 2, 3}
    assert told(run, "capture_failed") == {}


def test_a_layer_that_is_replaced_gives_its_own_rows(tmp_path: Path) -> None:
    handed: list[int] = []

    def replaced(model: Recurrent, step: int) -> None:
        if step == 2:
            model.core[1] = Block()
            model.core[1].moe.register_forward_hook(
                lambda module, args, output: handed.extend(
                    torch.bincount(output[1][2].flatten(), minlength=6)
                )
            )

    run = observed(tmp_path, change=replaced)
    rows = [row for row in run.arrow("router").to_pylist() if (row["step"], row["layer_idx"]) == (2, 1)]
    assert [count for row in rows for count in row["expert_count"]] == list(map(int, handed[: 3 * 6]))


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "valid"),
    [
        (lambda step: ids(step)[: 0 if step == 2 else 2], None),
        (lambda step: ids(step)[:, : 0 if step == 2 else 8], None),
        (lambda step: ids(step) * (step != 2), lambda args, kwargs: (args[0] != 0).any() & (args[0] >= 0)),
    ],
    ids=["no sequence", "no token", "padding only"],
)
def test_a_step_without_a_token_is_named_and_has_no_number(tmp_path: Path, batch: Any, valid: Any) -> None:
    run = observed(tmp_path, batch=batch, valid=valid)
    details = told(run, "no_valid_token")
    assert [*details] == [2]
    assert (
        "its batches are empty, or its mask says that all of it is padding. Leave such batches out"
        in details[2]
    )
    assert told(run, "capture_failed") == {}
    for table in ("router", "residual"):
        for row in run.arrow(table).to_pylist():
            assert row["num_tokens"] == (0 if row["step"] == 2 else 16)
            mean = row["margin_mean" if table == "router" else "norm_mean"]
            assert (mean is None) == (row["step"] == 2)


def test_a_router_that_gives_nan_is_named_and_its_means_are_null(tmp_path: Path) -> None:
    def break_one(model: Recurrent, step: int) -> None:
        if step == 2:
            model.core[1].moe.gate.weight.data.fill_(math.nan)

    run = observed(tmp_path, change=break_one)
    assert [*told(run, "nonfinite")] == [2, 3]
    assert re.search("router_logits has 96 non-finite entries in valid tokens", told(run, "nonfinite")[2])
    rows = {(row["step"], row["unrolled_pos"]): row for row in run.arrow("router").to_pylist()}
    for (step, position), row in rows.items():
        broken = step > 2 or (step == 2 and position >= 2)  # core.1 is second behind the prelude
        assert all((row[name] is None) == broken for name in ("z_mean", "margin_mean", "token_entropy_mean"))
        assert sum(row["expert_count"]) == 32
    assert len(rows) == 24
