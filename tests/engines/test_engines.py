"""Other engines read a run's Parquet files and agree with DuckDB: same counts, means to 1e-12."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_queries import Answers, ask_daft, ask_duckdb, ask_polars, ask_spark
from engine_runs import EXPERTS, LOOP_STEPS, TABLES_V2, compact_runs, make_runs

from loopscope.analysis import open_runs
from loopscope.store import RunReader
from loopscope.store.read.compact import adopt_into_delta, compact_run

ROWS = int(os.environ.get("LOOPSCOPE_ENGINE_ROWS", "20000"))
"""1,000,000 in `scripts/bench engines`."""
RANKS = 64 if ROWS > 100_000 else 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_runs(tmp_path_factory.mktemp("engines"), rows=ROWS, ranks=RANKS)


@pytest.fixture(scope="module")
def run_ids(runs: list[Path]) -> tuple[str, str]:
    first, second = (RunReader(r, tables=TABLES_V2).manifest.run_id for r in runs)
    return first, second


@pytest.fixture(scope="module", params=["sealed", "compacted"])
def dataset(request: pytest.FixtureRequest, runs: list[Path]) -> tuple[list[Path], bool]:
    """(folders with the tables, whether live rows need the join)."""
    if request.param == "sealed":
        return [r / "tables" for r in runs], True
    return compact_runs(runs), False


@pytest.fixture(scope="module")
def oracle(dataset: tuple[list[Path], bool], run_ids: tuple[str, str]) -> Answers:
    return ask_duckdb(dataset[0], run_ids, join=dataset[1])


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed (extra 'engines')")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java")
    builder = pyspark.sql.SparkSession.builder.master("local[2]").appName("loopscope")
    for key, value in {
        "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "4", "spark.sql.session.timeZone": "UTC", "spark.driver.memory": "2g",
    }.items():  # fmt: skip
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def same(got: Answers, expected: Answers) -> None:
    assert got.keys() == expected.keys()
    for name, rows in expected.items():
        assert len(got[name]) == len(rows), name
        for a, b in zip(sorted(got[name]), sorted(rows), strict=True):
            for x, y in zip(a, b, strict=True):
                if isinstance(y, float):
                    assert math.isclose(x, y, rel_tol=1e-12, abs_tol=1e-12), (name, a, b)
                else:
                    assert x == y, (name, a, b)


def test_the_oracle_agrees_with_the_reader(runs: list[Path], oracle: Answers) -> None:
    readers = [RunReader(r, tables=TABLES_V2) for r in runs]
    live = [r.read("router", columns=["step", "expert_count", "later"]) for r in readers]
    assert sorted(n for *_, n in oracle["worst_rank_per_step"]) == sorted(
        [RANKS * LOOP_STEPS] * sum(len(set(t["step"].to_pylist())) for t in live)
    )
    assert [(n, total) for _, n, total, _ in oracle["added_column"]] == [
        (len(t) - t["later"].null_count, len(t)) for t in live
    ]
    assert [s for _, s in oracle["assignments"]] == [
        sum(map(sum, t["expert_count"].to_pylist())) for t in live
    ]
    assert all(len(c) == EXPERTS for c in live[0]["expert_count"].to_pylist()[:10])
    assert all(r.check_all() == [] for r in readers)


def test_some_rows_are_superseded(runs: list[Path]) -> None:
    reader = RunReader(runs[0], tables=TABLES_V2)
    assert (
        reader.read("router", live=False, columns=["step"]).num_rows
        > reader.read("router", columns=["step"]).num_rows
    )


def test_polars(dataset: tuple[list[Path], bool], run_ids: tuple[str, str], oracle: Answers) -> None:
    pytest.importorskip("polars", reason="polars is not installed (extra 'engines')")
    same(ask_polars(dataset[0], run_ids, join=dataset[1]), oracle)


def test_daft(dataset: tuple[list[Path], bool], run_ids: tuple[str, str], oracle: Answers) -> None:
    pytest.importorskip("daft", reason="daft is not installed (extra 'engines')")
    same(ask_daft(dataset[0], run_ids, join=dataset[1]), oracle)


@pytest.mark.long
def test_spark(
    dataset: tuple[list[Path], bool], run_ids: tuple[str, str], oracle: Answers, spark: Any
) -> None:
    same(ask_spark(dataset[0], run_ids, join=dataset[1], session=spark), oracle)


def test_open_runs_joins_both(runs: list[Path], oracle: Answers) -> None:
    found = open_runs(runs[0].parent / "run *")
    assert [r.run_id for r in found] == sorted(r.run_id for r in found)
    counts = found.sql("select run_id, count(*) from router group by 1 order by 1").fetchall()
    assert counts == [(run_id, total) for run_id, _, total, _ in oracle["added_column"]]


def test_delta_adopts_the_files(runs: list[Path], tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed (extra 'engines')")
    compacted = compact_run(runs[0], tmp_path / "delta", tables=TABLES_V2, file_bytes=1 << 20)
    assert len(compacted.files["router"]) > 1
    assert adopt_into_delta(compacted)["router"] == 0
    table = deltalake.DeltaTable(str(compacted.path / "router"))
    live = RunReader(runs[0], tables=TABLES_V2).read("router", columns=["step", "later"])
    arrow = table.to_pyarrow_dataset().to_table(columns=["step", "later"])
    assert arrow.num_rows == live.num_rows
    assert sum(arrow["step"].to_pylist()) == sum(live["step"].to_pylist())
    assert table.optimize.compact()["numFilesRemoved"] == len(compacted.files["router"])
