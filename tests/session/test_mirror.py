"""`mirror`: a copy of everything sealed at another place, which never costs the training anything."""

from __future__ import annotations

import json
import logging
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loopscope.store.mirror.uploader as uploader
from loopscope import Loopscope, open_run
from loopscope.errors import ConfigError, RunExistsError
from loopscope.store import Remote, RunStore, StoreOptions
from loopscope.store.read.verify import verify_run
from loopscope.store.write.mirrored import MirroredRun
from loopscope.trace import LossComponents

LOSS = LossComponents(
    task_loss=2.0, lb_loss=1.0, lb_loss_factor=0.01, z_loss=0.5, z_loss_factor=0.001, total_loss=2.0105
)


def train(config: Loopscope.Config, steps: range = range(1, 6), **attempt: Any) -> Loopscope:
    """A training without a model: losses alone."""
    scope = Loopscope(config)
    with scope:
        scope.open(expected_visits=())
        collector = scope.begin_attempt(first_step=steps.start, **attempt)
        for step in steps:
            scope.begin_step(step)
            collector.on_metrics_step(step, LOSS)
    return scope


def config(tmp_path: Path, mirror: str, **more: Any) -> Loopscope.Config:
    return Loopscope.Config(out=tmp_path / "run", mirror=mirror, on_error="raise", **more)


def test_a_copy_at_a_path_and_at_a_url(tmp_path: Path) -> None:
    for name, address in (("a", str(tmp_path / "copy é a")), ("b", (tmp_path / "copy b").as_uri())):
        folder = tmp_path / name
        train(config(folder, address))
        copy = open_run(address)
        assert copy.arrow("loss")["step"].to_pylist() == [1, 2, 3, 4, 5]
        assert verify_run(copy.path).problems == []
        assert copy.manifest == open_run(folder / "run").manifest


def test_a_copy_in_memory_through_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    address = f"memory://bucket/{tmp_path.name}"
    train(config(tmp_path, address))
    train(config(tmp_path, address, resume=True), range(4, 8), parent_run_id=None)
    assert open_run(address).arrow("loss", live=False).num_rows == 9
    assert open_run(address).problems == []


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        ("nosuch://bucket/run", "nosuch"),
        ("runs/one", "absolute path"),
        ("s3://id:hidden@bucket/run", "a user or a password"),
        ("s3://bucket/run?sas_token=hidden", "'sas_token'"),
        (3, "int"),
    ],
)
def test_what_cannot_be_written_to_is_refused_before_a_run_is_there(
    tmp_path: Path, mirror: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        train(config(tmp_path, mirror))
    assert "hidden" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match="need fsspec and the package"):
        train(config(tmp_path, "memory://bucket/run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["", "/copy", "/.."])
def test_the_run_itself_is_no_mirror(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="apart from the run directory"):
        train(config(tmp_path, str(tmp_path / "run") + where))


def test_the_copy_of_another_run_is_never_written_over(tmp_path: Path) -> None:
    mirror = str(tmp_path / "copy")
    train(config(tmp_path / "first", mirror))
    before = open_run(mirror).run_id
    with pytest.raises(RunExistsError, match=before):
        train(config(tmp_path / "second", mirror))
    assert not (tmp_path / "second" / "run").exists()
    train(config(tmp_path / "third", ""))
    with pytest.raises(RunExistsError, match=before):
        train(config(tmp_path / "third", mirror, resume=True))
    assert open_run(mirror).run_id == before


class Unreachable(Remote):
    """A remote that answers only from the nth time on that it is asked."""

    def __init__(self, base: Path, refusals: int) -> None:
        found = Remote.of(str(base))
        super().__init__(found.filesystem, found.base)
        self.refusals = refusals
        self.asked = 0

    def put(self, data: bytes, name: str) -> None:
        self.asked += 1
        if self.asked <= self.refusals:
            raise FileNotFoundError("the bucket does not exist")
        super().put(data, name)


def test_a_remote_that_comes_late_gets_everything_and_failures_are_health_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remote = Unreachable(tmp_path / "copy", refusals=4)
    asked = []

    def of(uri: str, filesystem: object = None) -> Remote:
        asked.append(uri)
        if len(asked) < 4:
            raise OSError("no route to host")
        return remote

    monkeypatch.setattr(Remote, "of", of)
    failed = threading.Event()
    real = MirroredRun._note

    def note(mirror: MirroredRun, reason: str, count: int) -> None:
        real(mirror, reason, count)
        if count and not mirror._failed:
            failed.set()

    monkeypatch.setattr(MirroredRun, "_note", note)
    scope = Loopscope(config(tmp_path, "s3://bucket/run"))
    scope.open(expected_visits=())
    store = scope._store
    assert store is not None
    store.options = replace(store.options, retry_s=0.01)
    collector = scope.begin_attempt()
    store.mirror_to("s3://bucket/run")  # again, with the short wait
    assert failed.wait(20)
    collector.on_metrics_step(1, LOSS)
    scope.close()
    monkeypatch.undo()
    assert "no route to host" in caplog.text
    copy = open_run(tmp_path / "copy")
    assert copy.arrow("loss").num_rows == 1
    rows = [r for r in copy.arrow("health").to_pylist() if r["event"] == "upload_failed"]
    assert rows
    assert all(r["severity"] == "warn" and r["detail"] for r in rows)


def test_a_remote_that_never_comes_costs_the_training_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RunStore.create(tmp_path / "run", options=StoreOptions(retry_s=0.01))
    store.mirror_to(Unreachable(tmp_path / "copy", refusals=10**9))
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    writer.append("loss", {"step": 1})
    with caplog.at_level(logging.WARNING):
        store.close()
    assert "not everything is uploaded" in caplog.text
    assert "the bucket does not exist" in caplog.text
    assert store.upload_failures >= 6
    assert open_run(tmp_path / "run").arrow("loss").num_rows == 1


def test_an_upload_that_hangs_does_not_hold_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "_STUCK_S", 0.3)
    let_go = threading.Event()

    class Hanging(Unreachable):
        def put(self, data: bytes, name: str) -> None:
            let_go.wait(60)

    store = RunStore.create(tmp_path / "run")
    store.mirror_to(Hanging(tmp_path / "copy", 0))
    store.writer(attempt=store.claim_attempt(first_step=1)).append("loss", {"step": 1})
    store.close()
    assert store._mirror.uploader is not None
    assert "no file went up" in str(store._mirror.uploader.last_error)
    let_go.set()


def test_every_rank_copies_its_own_rows(tmp_path: Path) -> None:
    """Rank 0 closes first: what the others seal later goes up all the same."""
    mirror = str(tmp_path / "copy")
    scopes = [Loopscope(config(tmp_path, mirror)) for _ in range(3)]
    answers: dict[int, Any] = {}

    def decide_for(rank: int) -> Any:
        calls = iter(range(100))

        def decide(make: Any) -> Any:
            call = next(calls)
            return answers.setdefault(call, make()) if rank == 0 else answers[call]

        return decide

    for rank, scope in enumerate(scopes):
        scope.open(expected_visits=(), rank=rank, world_size=3, decide=decide_for(rank))
        scope.begin_attempt().on_metrics_step(1, LOSS)
    for scope in scopes:
        scope.close()
    copy = open_run(mirror)
    assert sorted(copy.arrow("loss")["rank"].to_pylist()) == [0, 1, 2]
    assert [p for p in verify_run(copy.path).problems if p.kind != "live"] == []


def test_the_address_is_kept_and_shown_by_the_run(tmp_path: Path) -> None:
    mirror = str(tmp_path / "copy")
    train(config(tmp_path, mirror))
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert stored["configuration"]["loopscope"]["mirror"] == mirror
