"""Trackers that do not start, or die: a health row, every other row, and the training bit by bit as without them."""

import pytest
import torch
from toy_run import train

from loopscope import open_run

WITHOUT_CLOCKS = "select * exclude (run_id, elapsed_s, wall_time) from {} order by all"


def failures(out):
    return [
        text
        for (text,) in open_run(out)
        .sql("select detail from health where event = 'tracker_failed' order by step")
        .fetchall()
    ]


def same_training(with_, without, out, other):
    assert all(torch.equal(a, b) for a, b in zip(with_, without, strict=True))
    for table in ("loss", "router", "residual", "transition", "probe_loss"):
        sql = WITHOUT_CLOCKS.format(table)
        rows = open_run(out).sql(sql).fetchall()
        assert rows
        assert repr(rows) == repr(
            open_run(other).sql(sql).fetchall()
        )  # as text, where null equals null and nan nan


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    out = tmp_path_factory.mktemp("untracked") / "run"
    return train(out, probe_at=(6,)), out


def test_trackers_change_nothing(tmp_path, untracked):
    parameters = train(tmp_path / "run", probe_at=(6,), trackers=("wandb", "tensorboard"))
    assert failures(tmp_path / "run") == []
    same_training(parameters, untracked[0], tmp_path / "run", untracked[1])


def test_wandb_without_a_key_is_a_health_row(tmp_path, monkeypatch, untracked):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody answers
    parameters = train(tmp_path / "run", probe_at=(6,), trackers=("wandb",))
    (detail,) = failures(tmp_path / "run")
    assert detail.startswith("wandb: did not start, and is off: ")
    assert "key" in detail.lower()
    same_training(parameters, untracked[0], tmp_path / "run", untracked[1])


def test_under_raise_a_failed_start_stops_the_run(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(wandb.Error, match="key"):
        train(tmp_path / "run", trackers=("wandb",), on_error="raise")


@pytest.mark.parametrize("when", ["log", "define_metric"])
def test_wandb_dies_in_the_middle(tmp_path, monkeypatch, untracked, when):
    import wandb

    calls = []
    real = getattr(wandb.sdk.wandb_run.Run, when)

    def dying(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > 4:
            raise BrokenPipeError("the service is gone")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, when, dying)
    parameters = train(tmp_path / "run", probe_at=(6,), trackers=("wandb", "tensorboard"))
    first, off = failures(tmp_path / "run")
    assert first.startswith("wandb: lost the values of a step: BrokenPipeError: the service is gone")
    assert off.startswith("wandb: is off after 3 failures in a row")
    same_training(parameters, untracked[0], tmp_path / "run", untracked[1])


def test_tensorboard_cannot_write(tmp_path, untracked):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file where the folder should be")
    parameters = train(tmp_path / "run", probe_at=(6,), trackers=("tensorboard",))
    (detail,) = failures(tmp_path / "run")
    assert detail.startswith("tensorboard: did not start, and is off: ")
    same_training(parameters, untracked[0], tmp_path / "run", untracked[1])


def test_what_the_trainer_could_not_start_is_told(tmp_path):
    refused = ConnectionError("torchtitan could not")
    share = lambda scope: scope.share_trackers({"wandb": refused})  # noqa: E731
    train(tmp_path / "run", last=2, trackers=("wandb",), prepare=share)
    (detail,) = failures(tmp_path / "run")
    assert detail.startswith("wandb: did not start, and is off: ConnectionError: torchtitan could not")


def test_a_failure_is_an_event_that_the_summary_shows(tmp_path, capsys):
    from loopscope.cli import main

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file")
    train(tmp_path / "run", last=2, trackers=("tensorboard",))
    assert main(["summary", str(tmp_path / "run")]) == 0
    assert "tracker_failed" in capsys.readouterr().out
