"""The machine beside a run: one writer per host, rows that name the last step that ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from capture_models import make, plan, train_step

import loopscope
from loopscope import Loopscope
from loopscope.errors import ConfigError
from loopscope.models.toy import ToyLoopMoE
from loopscope.session.system import samples, start_system
from loopscope.store import RunStore


@pytest.mark.parametrize(
    ("local", "rank", "sample"),
    [(None, 0, True), (None, 1, False), ("0", 0, True), ("0", 8, True), ("1", 9, False), ("", 0, True)],
)
def test_one_process_of_each_host_samples(
    monkeypatch: pytest.MonkeyPatch, local: str | None, rank: int, sample: bool
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert samples(rank) is sample


def wait_for_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        rows = loopscope.open_run(folder).arrow("system").to_pylist()
        if rows := [row for row in rows if row["step"] == step]:
            return rows
        time.sleep(0.02)
    raise AssertionError("no sample came")


def test_a_run_has_its_machines_rows(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    model = make()
    with loopscope.attach(model, out=tmp_path, plan=plan(), every=0, system_every_s=0.02) as run:
        for step in range(3):
            train_step(model, step)
            run.log_loss(1.0)
        (row, *_) = wait_for_rows(tmp_path, step=2)  # the third has not ended
        assert (row["device"], row["attempt"]) == ("host", 1)
        assert row["memory_total"] > row["memory_used"] > 0
        assert row["interval_s"] > 0
    opened = loopscope.open_run(tmp_path)
    count = opened.arrow("system").num_rows
    assert opened.sql("select count(distinct sampled_at) from system").fetchall() == [(count,)]
    assert opened.problems == []


def test_a_host_without_rows_of_its_own_gets_a_writer_for_its_machine(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    with RunStore.create(tmp_path / "run") as store:
        attempt = store.claim_attempt(first_step=1)
        writer = store.writer(attempt=attempt, writer="r00000")
        sampler = start_system(store, None, attempt=1, rank=0, every_s=0.02, step=lambda: 5)
        assert sampler is not None
        assert wait_for_rows(tmp_path / "run", step=5)
        sampler.stop()
        assert len(list((tmp_path / "run" / "journal").glob("00001-m00000-*.wal"))) == 1
        writer.close()


def test_without_psutil_a_run_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    scope = Loopscope(Loopscope.Config(out=tmp_path, system_every_s=0.01))
    scope.start(ToyLoopMoE(vocab_size=16))
    time.sleep(0.05)
    scope.close()
    assert loopscope.open_run(tmp_path).arrow("system").num_rows == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "often"])
def test_a_period_that_is_none_is_refused(tmp_path: Path, seconds: Any) -> None:
    with pytest.raises(ConfigError, match="expected seconds >= 0; 0 turns it off"):
        Loopscope.Config(out=tmp_path, system_every_s=seconds)
