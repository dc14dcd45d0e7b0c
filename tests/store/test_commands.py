from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from store_runs import QUIET, loss, write_attempt

from loopscope.cli.compact import Compact
from loopscope.cli.schemas import Schemas
from loopscope.cli.seal import Seal
from loopscope.cli.verify import Verify
from loopscope.errors import ConfigError, StoreError
from loopscope.store import RunReader, RunStore
from loopscope.store.read.compact import compact_run
from loopscope.store.read.verify import verify_run
from loopscope.store.seal.seal_run import seal_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    write_attempt(root, range(1, 11))
    write_attempt(root, range(6, 9), parent=1, seal=False)
    return root


def test_verify_says_what_is_wrong(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Verify(path=run).run() == 0
    path = next((run / "tables" / "loss").glob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-9])
    assert Verify(path=run).run() == 1
    said = " ".join(capsys.readouterr().out.split())
    assert path.name in said
    assert "10 row(s) known to be lost" in said


def test_seal_seals_and_a_second_time_has_nothing_to_do(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = RunReader(run).read("loss")
    assert Seal(path=run).run() == 0
    assert not list(run.glob("journal/*.wal"))
    assert RunReader(run).read("loss").equals(before)
    assert Seal(path=run).run() == 0
    assert "nothing to seal" in capsys.readouterr().out
    live = pq.read_table(run / "tables" / "attempt" / "attempts.parquet").to_pylist()
    assert [(r["live_from"], r["live_to"]) for r in live] == [(0, 6), (6, None)]


def test_seal_leaves_a_journal_alone_that_is_being_written(run: Path) -> None:
    with RunStore.open(run, options=QUIET) as store:
        store.writer(attempt=2, writer="r1").append("loss", loss(9))
        report = seal_run(run)
        assert report.busy == ["00002-r1-00001.wal"]
        assert [s.journal for s in report.sealed] == ["00002-r0-00001.wal"]


def test_a_damaged_journal_is_sealed_as_far_as_it_goes_and_kept(run: Path) -> None:
    path = next(run.glob("journal/*.wal"))
    data = bytearray(path.read_bytes())
    data[len(data) - len(data) // 3] ^= 1
    path.write_bytes(data)
    report = seal_run(run)
    assert (report.sealed[0].lost, report.sealed[0].rows) == (1, 2)
    assert [p.name for p in run.glob("journal/*.damaged")] == ["00002-r0-00001.wal.damaged"]
    problems = RunReader(run).check_all()
    assert sum(p.lost_rows or 0 for p in problems) == 1
    assert Seal(path=run).run() == 0


def test_compact_holds_live_rows_only_and_replaces_an_older_one(run: Path) -> None:
    assert Compact(path=run).run() == 0
    assert pq.read_table(run / "compact" / "loss")["step"].to_pylist() == list(range(1, 9))
    with RunStore.open(run, options=QUIET) as store:
        store.writer(attempt=2).append("loss", loss(9))
    assert Compact(path=run).run() == 0
    assert pq.read_table(run / "compact" / "loss").num_rows == 9
    assert sorted(p.name for p in run.iterdir() if "tmp" in p.name) == []


def test_readers_look_while_the_run_is_compacted_and_sealed(run: Path) -> None:
    stop, seen = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            seen.append(RunReader(run).read("loss")["step"].to_pylist())
            assert verify_run(run).problems == []

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for number in range(6):
            compact_run(run)
            write_attempt(run, range(9, 10 + number), parent=2 + number, seal=number % 2 == 0)
            seal_run(run)
        stop.set()
        looking.result()
    assert all(sorted(steps)[:8] == list(range(1, 9)) for steps in seen)


def test_compact_touches_no_folder_of_others(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="something else"):
        compact_run(run, other)
    assert (other / "thesis.tex").exists()


def test_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    assert Schemas(table="loss").run() == 0
    assert "closure_error" in capsys.readouterr().out
    assert Schemas(table="nope").run() == 2


@pytest.mark.parametrize("out", ["file", "file/below", "x" * 300])
def test_compact_refuses_in_words_where_it_cannot_write(run: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"is a file|cannot be written"):
        compact_run(run, tmp_path / out)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_name_of_a_file_moves_no_cursor(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "tables" / "loss" / "a\x1b[31mred.parquet").write_bytes(b"")
    assert Verify(path=run).run() == 1
    Compact(path=run).run()
    assert "red.parquet" in (said := capsys.readouterr().out)
    assert "\x1b" not in said
