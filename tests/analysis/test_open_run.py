from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from loopscope import open_run
from loopscope.analysis import open_runs
from loopscope.errors import NotARunError
from loopscope.store import RunStore, StoreOptions

OPTIONS = StoreOptions(tick_s=3600.0, on_error="raise")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "runs" / "first 'run' [é]"
    for first, last, parent in ((1, 10, None), (6, 8, 1)):
        store = (RunStore.open if parent else RunStore.create)(root, options=OPTIONS)
        writer = store.writer(attempt=store.claim_attempt(first_step=first, parent_attempt=parent))
        for step in range(first, last + 1):
            writer.append("loss", {"step": step, "task_loss": step / 4, "aggregation_scope": "global"})
            writer.append("router", {"step": step, "unrolled_pos": 3, "expert_count": [step, 1]})
        store.close(seal=parent is None)
    return root


def test_tables_and_attempts(run: Path) -> None:
    found = open_run(run)
    assert found.tables == ["loss", "router", "attempt"]
    assert [a.attempt for a in found.attempts] == [1, 2]
    assert found.problems == []
    assert found.run_id in repr(found)


def test_arrow_polars_and_pandas_agree(run: Path) -> None:
    pytest.importorskip("polars", reason="polars is not installed")
    pytest.importorskip("pandas", reason="pandas is not installed")
    found = open_run(run)
    steps = found.arrow("loss", columns=["step"])["step"].to_pylist()
    assert steps == list(range(1, 9))
    assert found.polars("loss", columns=["step"])["step"].to_list() == steps
    assert list(found.pandas("loss", columns=["step"])["step"]) == steps
    assert found.arrow("loss", live=False).num_rows == 13


def test_sql_over_parts_and_journal(run: Path) -> None:
    found = open_run(run)
    query = "select l.step, l.task_loss, r.expert_count from loss l join router r using (step) order by step"
    assert found.sql(query).fetchall() == [(s, s / 4, [s, 1]) for s in range(1, 9)]
    assert found.sql("select count(*) from loss_all").fetchall() == [(13,)]
    assert found.sql("select count(*) from loss where step > ?", [6]).fetchall() == [(2,)]
    assert found.sql("select attempt, live_from, live_to from attempt order by 1").fetchall() == [
        (1, 0, 6), (2, 6, None),
    ]  # fmt: skip
    assert found.sql("select count(*), max(event) from health").fetchall() == [(0, None)]
    names = {r[0] for r in found.connection.sql("show tables").fetchall()}
    assert {"loss", "loss_all", "router", "attempt", "probe_loss"} <= names


def test_refresh_sees_what_came_later(run: Path) -> None:
    found = open_run(run)
    with RunStore.open(run, options=OPTIONS) as store:
        store.writer(attempt=2).append("loss", {"step": 9})
        assert found.arrow("loss").num_rows == 8
        assert found.refresh().arrow("loss").num_rows == 9


def test_a_run_without_rows(tmp_path: Path) -> None:
    RunStore.create(tmp_path / "run", options=OPTIONS).close()
    found = open_run(tmp_path / "run")
    assert found.tables == []
    assert found.arrow("loss").num_rows == 0
    assert found.sql("select count(*) from router").fetchall() == [(0,)]
    assert found.problems == []


def test_many_runs_and_a_copy(run: Path) -> None:
    import shutil

    shutil.copytree(run, run.with_name("z copy"))
    with RunStore.create(run.with_name("second"), options=OPTIONS) as store:
        store.writer(attempt=store.claim_attempt(first_step=1)).append("loss", {"step": 1, "task_loss": 9.0})
    run.with_name("notes").mkdir()
    found = open_runs(run.parent / "*")
    assert len(found) == 2
    assert len(found.skipped) == 2
    assert found[0].run_id < found[1].run_id
    assert found.arrow("loss").num_rows == 9
    rows = found.sql(
        "select run_name, count(*) from loss join run using (run_id) group by 1 order by 2"
    ).fetchall()
    assert rows == [("second", 1), (run.name, 8)]
    with pytest.raises(NotARunError, match="no run matches"):
        open_runs(run.parent / "nothing*")


def test_many_runs_are_few_selects_with_their_settings(tmp_path: Path) -> None:
    options = StoreOptions(tick_s=3600.0, seal_in="thread", on_error="raise")
    for index in range(6):
        # Every third run was rolled back from step 4 to 2; the last one is still in its journal.
        spans = [(1, 4, None), (3, 5, 1)] if index % 3 == 0 else [(1, 5, None)]
        configuration = {"trainer": {"lr": index / 8}}
        for first, last, parent in spans:
            path = tmp_path / f"run{index}"
            store = (
                RunStore.open(path, options=options)
                if parent
                else RunStore.create(path, configuration=configuration, options=options)
            )
            writer = store.writer(attempt=store.claim_attempt(first_step=first, parent_attempt=parent))
            for step in range(first, last + 1):
                writer.append("loss", {"step": step, "task_loss": 100 * index + first})
            store.close(seal=index != 5)
    runs = open_runs(tmp_path / "run*")
    rows = runs.sql(
        "select cast(configuration ->> '$.trainer.lr' as double) as lr, step, task_loss from loss join run using "
        "(run_id) order by all"
    ).fetchall()
    assert rows == [
        (index / 8, step, 100 * index + (3 if index % 3 == 0 and step > 2 else 1))
        for index in range(6)
        for step in range(1, 6)
    ]
    assert runs.sql("select count(*) from loss_all").fetchall() == [(6 * 5 + 2 * 2,)]
    plan = runs.sql("select sql from duckdb_views() where view_name = 'loss'").fetchall()[0][0]
    assert plan.count("read_parquet") == 3  # whole runs; first attempts up to step 2; second attempts from 3


def test_a_connection_that_refuses_its_progress_bar_is_used_without(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What DuckDB does in a notebook where ipywidgets is missing: the bar is off, and no setting of it is accepted."""
    connect = duckdb.connect

    class Notebook:
        def __init__(self, database: str) -> None:
            self._inner = connect(database)
            self._inner.execute("set enable_progress_bar = false")

        def execute(self, query: str) -> object:
            if "set enable_progress_bar" in query:
                raise duckdb.InvalidInputException("required package 'ipywidgets' is missing")
            return self._inner.execute(query)

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    monkeypatch.setattr(duckdb, "connect", Notebook)
    assert open_run(run).sql("select count(*) from loss").fetchall() == [(8,)]
