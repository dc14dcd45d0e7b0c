"""Whatever a loop says wrongly of its steps and losses: a critical event, and a training that goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopscope
from loopscope.errors import ConfigError, TraceError

PLAN = {"0": {"tensors": {"residual": "output"}, "placements": {}, "merge": "sum"}}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(of: nn.Module) -> None:
    of(torch.ones(2, 3, 4)).sum().backward()


def trained(out: Path, says: Callable[[Any], Any], *, first: bool = False, **options: Any) -> Any:
    """Says it before or behind the first of two steps; the run."""
    of = model()
    with loopscope.attach(of, out=out, plan=PLAN, **options) as run:
        if first:
            says(run)
        step(of)
        if not first:
            says(run)
        step(of)
    return loopscope.open_run(out)


def critical(run: Any) -> list[tuple[str, str]]:
    rows = run.arrow("health").to_pylist()
    return [(row["event"], row["detail"]) for row in rows if row["severity"] == "critical"]


WRONG_LOSSES = [torch.ones(3), torch.ones((), device="meta"), None, "1,5", 1j, {"loss": 1.0}]


@pytest.mark.parametrize("loss", WRONG_LOSSES, ids=["vector", "meta", "None", "text", "complex", "mapping"])
def test_a_loss_that_is_no_number(tmp_path: Path, loss: Any) -> None:
    run = trained(tmp_path / "run", lambda run: run.log_loss(loss))
    ((event, detail),) = critical(run)
    assert (event, detail[:10]) == ("loss_unread", "log_loss: ")
    assert len(run.arrow("loss")) == 0
    assert {row["step"] for row in run.arrow("residual").to_pylist()} == {1, 2}
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        trained(tmp_path / "raised", lambda run: run.log_loss(loss), on_error="raise")


def test_a_loss_before_the_first_forward(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", lambda run: run.log_loss(1.0), first=True)
    assert critical(run) == [
        ("loss_unread", "log_loss: no training forward was seen yet; expected one before the first loss.")
    ]
    assert {row["step"] for row in run.arrow("residual").to_pylist()} == {1, 2}
    with pytest.raises(ConfigError, match="no training forward was seen yet"):
        trained(tmp_path / "raised", lambda run: run.log_loss(1.0), first=True, on_error="raise")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 0}, "step is 0, expected an integer >= 1"),
        ({"step": "2"}, "step is '2', expected an integer >= 1"),
        ({"step": 2.0}, "step is 2.0, expected an integer >= 1"),
        ({"step": None}, "step is None, expected an integer >= 1"),
        ({"step": 2, "num_microbatches": 0}, "num_microbatches is 0, expected an integer >= 1"),
        ({"step": 2, "num_microbatches": "4"}, "num_microbatches is '4', expected an integer >= 1"),
    ],
)
def test_a_step_that_is_none_has_no_rows(tmp_path: Path, arguments: Any, message: str) -> None:
    run = trained(tmp_path / "run", lambda run: run.begin_step(**arguments))
    assert critical(run) == [("no_trace", f"begin_step: {message}.")]
    assert {row["step"] for row in run.arrow("residual").to_pylist()} == {1}
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path / "raised", lambda run: run.begin_step(**arguments), on_error="raise")


def test_a_step_that_was_before_has_no_rows(tmp_path: Path) -> None:
    def says(run: Any) -> None:
        run.begin_step(5)
        run.begin_step(3)

    run = trained(tmp_path / "run", says)
    assert (
        "no_trace",
        "begin_step: step is 3, expected more than 5: each begins once, in order.",
    ) in critical(run)
    assert {row["step"] for row in run.arrow("residual").to_pylist()} == {1}
    of = trained(tmp_path / "early", lambda run: run.begin_step(3), first_step=7)
    assert critical(of) == [
        ("no_trace", "begin_step: step is 3, expected 7 (`first_step` of attach) or more.")
    ]


def test_a_step_that_begins_again_with_nothing_in_it_is_the_same(tmp_path: Path) -> None:
    def says(run: Any) -> None:
        run.begin_step(2, lr=0.5)
        run.begin_step(2, lr=0.25)

    run = trained(tmp_path / "run", says)
    assert critical(run) == []
    assert {row["step"] for row in run.arrow("residual").to_pylist()} == {1, 2}


def test_numbers_of_other_kinds_are_steps(tmp_path: Path) -> None:
    run = trained(
        tmp_path / "run", lambda run: run.begin_step(torch.tensor(2), num_microbatches=torch.tensor(1))
    )
    assert critical(run) == []
    assert {row["step"] for row in run.arrow("residual").to_pylist()} == {1, 2}


CALLS: dict[str, Callable[[Any], Any]] = {
    "log_loss": lambda run: run.log_loss(1.0),
    "begin_step": lambda run: run.begin_step(9),
    "end_step": lambda run: run.end_step(tokens_seen=3),
    "drop_step": lambda run: run.drop_step("because"),
    "log_step": lambda run: run.log_step(1, loss=1.0),
    "close": lambda run: run.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_loop_that_outlives_the_attachment_is_not_ended(tmp_path: Path, call: str) -> None:
    of = model()
    with loopscope.attach(of, out=tmp_path / "run", plan=PLAN) as run:
        step(of)
    CALLS[call](run)
    step(of)


@pytest.mark.parametrize("call", ["log_loss", "begin_step"])
def test_an_attachment_that_was_never_opened_says_so(tmp_path: Path, call: str) -> None:
    run = loopscope.attach(model(), out=tmp_path / "run", plan=PLAN)
    with pytest.raises(TraceError, match=r"expected `with loopscope\.attach"):
        CALLS[call](run)
