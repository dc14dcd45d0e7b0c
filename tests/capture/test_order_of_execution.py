"""Models whose blocks are skipped, nested, shared, tried again or fed in parts: rows against own hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_models import BLOCK, EXPERTS, ROUTER, VOCAB, WIDTH, Block, Mixture, ids
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import loopscope
from loopscope.capture.errors import CoverageError, PlanError

MOE = {"*.moe": dict(ROUTER)}


class Steps(nn.Module):
    """Named blocks that a function runs in whatever way."""

    def __init__(self, run: Callable[[Steps, Tensor], Tensor], *blocks: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.run = run
        self.kept: list[tuple[str, list[int]]] = []
        """(block, tokens of each expert) of every mixture that ran to its end, in order."""
        for name in blocks:
            self.add_module(name, Block())
            self.get_submodule(name).moe.register_forward_hook(self._note(name))

    def _note(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                self.kept.append((name, torch.bincount(output[1][2].flatten(), minlength=EXPERTS).tolist()))

        return note

    def forward(self, tokens: Tensor) -> Tensor:
        self.kept.clear()
        return self.run(self, self.embed(tokens))


def trained(
    folder: Path,
    model: nn.Module,
    plan: dict[str, Any],
    batches: list[list[Tensor]] | None = None,
    **how: Any,
) -> loopscope.Run:
    """A run with one traced step per list of microbatches."""
    batches = batches or [[ids()]]
    with loopscope.attach(model, out=folder, plan={**MOE, **plan}, every=1, **how) as run:
        for number, step in enumerate(batches, 1):
            run.begin_step(number, num_microbatches=len(step))
            for batch in step:
                model(batch).square().mean().backward()
            run.log_loss(1.0)
    return loopscope.open_run(folder)


def addresses(run: loopscope.Run, step: int = 1) -> list[tuple[int, str, int | None, int | None]]:
    rows = run.sql(
        f"SELECT unrolled_pos, block, loop_step, layer_idx FROM router WHERE step = {step} ORDER BY unrolled_pos"
    ).fetchall()
    return [tuple(row) for row in rows]


def counts(run: loopscope.Run, step: int = 1) -> list[list[int]]:
    rows = run.sql(f"SELECT expert_count FROM router WHERE step = {step} ORDER BY unrolled_pos").fetchall()
    return [row[0] for row in rows]


def events(run: loopscope.Run, name: str) -> list[tuple[int, str, str]]:
    return run.sql(
        f"SELECT step, severity, detail FROM health WHERE event = '{name}' ORDER BY step"
    ).fetchall()


def block(calls: int | None = 1, **more: Any) -> dict[str, Any]:
    return {**BLOCK, "calls": calls, **more}


def test_an_optional_block_that_is_not_called_costs_its_own_rows_only(tmp_path: Path) -> None:
    def run(model: Steps, x: Tensor) -> Tensor:
        x = model.a(x)
        return model.c(x if model.skips else model.b(x))

    model = Steps(run, "a", "b", "c")
    kept = []
    plan = {name: block() for name in "abc"}
    with loopscope.attach(model, out=tmp_path / "run", plan={**MOE, **plan}, every=1) as attached:
        for skips in (False, True, True):
            model.skips = skips
            model(ids()).square().mean().backward()
            kept.append([each for _, each in model.kept])
            attached.log_loss(1.0)
    found = loopscope.open_run(tmp_path / "run")
    assert [counts(found, step) for step in (1, 2, 3)] == kept
    assert addresses(found, 2) == [(0, "loop", 0, 0), (2, "loop", 0, 2)]
    assert [(step, severity) for step, severity, _ in events(found, "coverage")] == [
        (1, "info"),
        (2, "warn"),
        (3, "warn"),
    ]
    ((step, severity, detail),) = events(found, "not_called")  # once
    assert (step, severity) == (2, "warn")
    assert "1 of 3 captured modules were not called, or their hooks did not run: b." in detail
    assert "calls: null" in detail
    assert found.sql(
        "SELECT count(*) FROM transition WHERE step = 2 AND from_pos = 0 AND to_pos = 2"
    ).fetchall() == [(0,)]

    model.skips = True
    with pytest.raises(CoverageError, match="not called"):
        trained(tmp_path / "raise", model, plan, on_error="raise")
    optional = trained(tmp_path / "optional", model, {**plan, "b": block(None)}, on_error="raise")
    assert not events(optional, "not_called")
    assert counts(optional) == kept[1]


def test_a_block_of_one_pass_has_the_number_of_that_pass(tmp_path: Path) -> None:
    def run(model: Steps, x: Tensor) -> Tensor:
        for number in range(3):
            x = model.extra(x) if number == 1 else x
            x = model.core(x)
        return x

    model = Steps(run, "extra", "core")
    found = trained(tmp_path, model, {"extra": block(None), "core": block(3)}, on_error="raise")
    assert addresses(found) == [(0, "loop", 0, 1), (1, "loop", 1, 0), (2, "loop", 1, 1), (3, "loop", 2, 1)]
    assert counts(found) == [each for _, each in model.kept]


def test_microbatches_of_different_depth_give_one_row_per_visit(tmp_path: Path) -> None:
    def run(model: Steps, x: Tensor) -> Tensor:
        x = model.prelude(x)
        for _ in range(next(depths)):
            x = model.core(x)
        kept.append(list(model.kept))
        return model.coda(x)

    model = Steps(run, "prelude", "core", "coda")
    batches = [[ids(1), ids(2), ids(3)]]
    plan = {"prelude": block(), "core": block(4), "coda": block()}
    depths, kept = iter((1, 4, 2)), []
    found = trained(tmp_path, model, plan, batches, on_error="raise")
    loop = [(1 + step, "loop", step, 0) for step in range(4)]
    assert addresses(found) == [(0, "head", None, None), *loop, (5, "tail", None, None)]
    for step in range(4):
        due = [each[1 + step][1] for each in kept if len(each) > 1 + step]
        assert counts(found)[1 + step] == [sum(column) for column in zip(*due, strict=True)]
    assert found.sql("SELECT num_microbatches FROM router ORDER BY unrolled_pos").fetchall() == [
        (3,), (3,), (2,), (1,), (1,), (3,)
    ]  # fmt: skip
    assert [(step, severity) for step, severity, _ in events(found, "coverage")] == [(1, "info")]


def test_a_block_that_failed_and_is_tried_again_is_one_visit(tmp_path: Path) -> None:
    def run(model: Steps, x: Tensor) -> Tensor:
        with suppress(ZeroDivisionError):
            model.a(x, scale=Once())
        return model.b(model.a(x))

    class Once:
        def __mul__(self, other: Tensor) -> Tensor:
            raise ZeroDivisionError  # behind the router

    model = Steps(run, "a", "b")
    found = trained(tmp_path, model, {"a": block(), "b": block()}, on_error="raise")
    assert [name for name, _ in model.kept] == ["a", "a", "b"]
    assert counts(found) == [each for _, each in model.kept[1:]]
    assert addresses(found) == [(0, "loop", 0, 0), (1, "loop", 0, 1)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_within_the_forward_is_no_visit(tmp_path: Path, reentrant: bool) -> None:
    def run(model: Steps, x: Tensor) -> Tensor:
        y = checkpoint(model.a, x, use_reentrant=reentrant)
        y.sum().backward(retain_graph=True)
        return model.b(y)

    model = Steps(run, "a", "b")
    found = trained(tmp_path, model, {"a": block(), "b": block()}, on_error="raise")
    assert counts(found) == [each for _, each in model.kept]
    assert len(model.kept) == 2


def test_one_module_under_several_names_is_a_loop(tmp_path: Path) -> None:
    def run(model: Steps, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = layer(x)
        return x

    model = Steps(run, "shared")
    model.layers = nn.ModuleList([model.shared] * 3)
    found = trained(
        tmp_path,
        model,
        {"layers.*": block()} if False else {f"layers.{n}": block() for n in range(3)},
        on_error="raise",
    )
    assert addresses(found) == [(step, "loop", step, 0) for step in range(3)]
    assert counts(found) == [each for _, each in model.kept]
    with pytest.raises(PlanError, match="under another name"):
        loopscope.attach(
            model, out=tmp_path / "no", plan={**MOE, "layers.0": block(), "layers.1": block(tokens="chunks")}
        )


def test_a_router_that_layers_share_belongs_to_the_one_that_runs(tmp_path: Path) -> None:
    model = Steps(lambda model, x: model.b(model.a(x)), "a", "b")
    model.b.moe = model.a.moe
    found = trained(tmp_path, model, {"a": block(), "b": block()}, on_error="raise")
    assert counts(found) == [each for _, each in model.kept]
    assert addresses(found) == [(0, "loop", 0, 0), (1, "loop", 0, 1)]


class Apart(nn.Module):
    """Routers and states in lists beside each other; no layer is a module."""

    def __init__(self, loops: int = 2, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loops = loops
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixtures = nn.ModuleList(Mixture() for _ in range(layers))
        self.states = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.kept: list[list[int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        self.kept.clear()
        for _ in range(self.loops):
            for mixture, state in zip(self.mixtures, self.states, strict=True):
                mixed, (_, _, idx) = mixture(x)
                self.kept.append(torch.bincount(idx.flatten(), minlength=EXPERTS).tolist())
                x = state(x + mixed)
        return x


def test_a_router_beside_its_block_names_it(tmp_path: Path) -> None:
    plan = {
        "states.?": block(2),
        "mixtures.?": {**ROUTER, "block": "states.*"},
    }
    model = Apart()
    with loopscope.attach(model, out=tmp_path / "run", plan=plan, every=1, on_error="raise") as run:
        model(ids()).square().mean().backward()
        run.log_loss(1.0)
    found = loopscope.open_run(tmp_path / "run")
    assert addresses(found) == [(2 * r + i, "loop", r, i) for r in range(2) for i in range(2)]
    assert counts(found) == model.kept
    with pytest.raises(PlanError, match=r"name that block: `block: NAME`"):
        loopscope.attach(model, out=tmp_path / "no", plan={"states.?": block(2), "mixtures.?": dict(ROUTER)})
    with pytest.raises(
        PlanError, match=r"block is 'state.0', expected a boundary .* Did you mean 'states.0'"
    ):
        loopscope.attach(
            model, out=tmp_path / "no", plan={**plan, "mixtures.?": {**ROUTER, "block": "state.*"}}
        )


def test_a_router_that_is_called_otherwise_than_its_block_is_said(tmp_path: Path) -> None:
    model = Apart()
    model.mixtures[1] = model.mixtures[0]
    plan = {"states.?": block(2), "mixtures.0": {**ROUTER, "block": "states.0"}}
    with loopscope.attach(model, out=tmp_path, plan=plan, every=1) as run:
        model(ids()).square().mean().backward()
        run.log_loss(1.0)
    found = loopscope.open_run(tmp_path)
    ((_, severity, detail),) = events(found, "capture_failed")
    assert severity == "critical"
    assert "mixtures.0 was called 4 times, its block 'states.0' 2 times" in detail


@pytest.mark.parametrize("told", [None, "chunks", "same"])
def test_passes_over_parts_of_the_sequence_are_not_compared(tmp_path: Path, told: str | None) -> None:
    def run(model: Steps, x: Tensor) -> Tensor:
        return torch.cat([model.b(model.a(part)) for part in x.chunk(2, dim=1)], 1)

    model = Steps(run, "a", "b")
    tokens = {} if told is None else {"tokens": told}
    found = trained(tmp_path, model, {"a": block(2, **tokens), "b": block(2, **tokens)}, on_error="raise")
    assert counts(found) == [each for _, each in model.kept]
    kinds = {kind for (kind,) in found.sql("SELECT DISTINCT kind FROM transition").fetchall()}
    assert kinds == ({"within_step", "step_boundary", "wrap"} if told == "same" else {"within_step"})
    assert [severity for _, severity, _ in events(found, "chunks")] == ([] if told == "same" else ["info"])


def test_passes_over_the_whole_sequence_are_compared(tmp_path: Path) -> None:
    model = Steps(lambda model, x: model.a(model.a(x)), "a")
    found = trained(tmp_path, model, {"a": block(2)}, on_error="raise")
    assert found.sql("SELECT count(*) FROM transition WHERE kind = 'step_boundary'").fetchall() == [(1,)]


def test_a_visit_whose_router_was_not_called_keeps_its_residual(tmp_path: Path) -> None:
    def run(model: Steps, x: Tensor) -> Tensor:
        model.b.forward = (lambda x, scale=1.0: x) if model.plain else type(model.b).forward.__get__(model.b)
        return model.b(model.a(x))

    model = Steps(run, "a", "b")
    model.plain = True
    found = trained(tmp_path, model, {"a": block(), "b": block()})
    assert counts(found) == [each for _, each in model.kept]
    assert found.sql("SELECT unrolled_pos FROM residual ORDER BY 1").fetchall() == [(0,), (1,)]
    ((_, severity, detail),) = events(found, "not_called")
    assert (severity, "the routers of 1 visits" in detail) == ("warn", True)
