from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_runs import QUIET, loss, visit

from loopscope.errors import SchemaError
from loopscope.store import RowWriter, RunReader, RunStore, StoreOptions
from loopscope.store.read.verify import verify_run


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with RunStore.create(tmp_path / "run", options=QUIET) as made:
        yield made


def test_the_stores_writer_is_a_row_writer(store: RunStore) -> None:
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    assert isinstance(writer, RowWriter)
    assert (writer.dropped, writer.fsync_failures) == (0, 0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"step": 1, "nope": 1}, "unknown field `nope`"),
        ({"task_loss": 1.0}, "missing required field `step`"),
        ({"step": None}, "got `null`"),
        ({"step": "1"}, "got `str`"),
        ({"step": 1.5}, "got `float`"),
        ({"step": True}, "got `bool`"),
        ({"step": 1, "task_loss": float("nan")}, r"\$.task_loss"),
        ({"step": 1, "task_loss": float("inf")}, r"\$.task_loss"),
        ({"step": 1, "task_loss": float("-inf")}, r"\$.task_loss"),
        ({"step": 1, "task_loss": np.float64("nan")}, r"\$.task_loss"),
        ({"step": 1, "task_loss": np.ones(2)}, r"numpy.ndarray"),
        ({"step": 1, "rank": 2**31}, r"\$.rank"),
        ({"step": 2**63}, r"\$.step|out of range"),
        ({"step": 1, "wall_time": datetime(2026, 1, 1)}, r"\$.wall_time"),
        ({"step": 1, "run_id": "another"}, "belongs to run"),
        ({"step": 1, "attempt": 7}, "attempt 7"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(store: RunStore, row: dict[str, Any], says: str) -> None:
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    with pytest.raises(SchemaError, match=says):
        writer.append("loss", row)
    assert writer.dropped == 1


@pytest.mark.parametrize(
    "row",
    [
        visit(1, expert_mass=[1.0, float("nan")]),
        visit(1, expert_mass=[1e39]),
        visit(1, expert_count=[1.0]),
        visit(1, expert_count=(1, "2")),
        {"step": 1},
    ],
)
def test_a_list_that_does_not_fit_is_refused(store: RunStore, row: dict[str, Any]) -> None:
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    with pytest.raises(SchemaError):
        writer.append("router", row)


def test_an_unknown_table_is_refused(store: RunStore) -> None:
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    with pytest.raises(SchemaError, match="there is no table 'losses'"):
        writer.append("losses", loss(1))


def test_under_record_a_bad_row_is_counted_and_the_count_is_stored(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", options=StoreOptions(tick_s=3600.0))
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    writer.append("loss", loss(1))
    writer.append("loss", loss(2, tusk_loss=1.0))
    writer.append("loss", loss(3))
    assert (writer.attempted, writer.dropped) == (3, 1)
    store.close()
    reader = RunReader(tmp_path / "run")
    assert reader.read("loss")["step"].to_pylist() == [1, 3]
    (row,) = reader.read("health").to_pylist()
    assert (row["event"], row["severity"], row["count"]) == ("dropped_rows", "critical", 1)
    assert "tusk_loss" in row["detail"]


@pytest.mark.parametrize("seal", [False, True])
def test_what_is_read_is_what_was_written(tmp_path: Path, seal: bool) -> None:
    when = datetime(2026, 3, 4, 5, 6, 7, 89, tzinfo=UTC)
    row = visit(
        5, 3, rank=2, block="loop", num_experts=4, expert_count=[2**53 + 1, 0, 1, 2], mean_prob=[0.1, 0.2],
        z_mean=-0.1, tokens_seen=2**40, wall_time=when, null_reasons='{"margin_mean": "not_applicable"}',
    )  # fmt: skip
    store = RunStore.create(tmp_path / "run", options=QUIET)
    store.writer(attempt=store.claim_attempt(first_step=1)).append("router", row)
    store.close(seal=seal)
    (got,) = RunReader(tmp_path / "run").read("router").to_pylist()
    assert got.pop("mean_prob") == [float(np.float32(0.1)), float(np.float32(0.2))]
    assert got.pop("run_id") == store.run_id
    assert got.pop("attempt") == 1
    assert {k: v for k, v in got.items() if v is not None} == {
        k: v for k, v in row.items() if v is not None and k != "mean_prob"
    }


def test_null_is_null_and_zero_is_zero(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", options=QUIET)
    store.writer(attempt=store.claim_attempt(first_step=1)).append("loss", loss(1, 0.0, z_loss=None))
    store.close()
    (row,) = RunReader(tmp_path / "run").read("loss").to_pylist()
    assert row["task_loss"] == 0.0
    assert row["z_loss"] is None
    assert row["lb_loss"] is None


def test_a_training_that_changes_its_folder_writes_on_in_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunStore.create("run", options=replace(QUIET, rotate_bytes=2000)) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        for step in range(1, 101):
            writer.append("loss", loss(step))
            if step == 30:
                monkeypatch.chdir("elsewhere")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert RunReader(tmp_path / "run").read("loss")["step"].to_pylist() == list(range(1, 101))
    assert verify_run(tmp_path / "run").problems == []
    assert not list((tmp_path / "run").glob("journal/*.lock"))
