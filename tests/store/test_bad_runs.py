"""Folders that are wrong in some way: what can be read is read, and the rest is named."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path

import pytest
from store_runs import change_manifest, write_attempt

from loopscope.analysis import open_run
from loopscope.errors import (
    ConfigError,
    LeftOutWarning,
    NotARunError,
    RunExistsError,
    SchemaError,
    StoreError,
)
from loopscope.store import RunReader, RunStore, read_table
from loopscope.store.disk import Disk
from loopscope.store.manifest import LAYOUT
from loopscope.store.read.verify import verify_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run with blanks, 'quotes' and é [1] *"
    write_attempt(root, range(1, 11))
    write_attempt(root, range(6, 9), parent=1)
    return root


def part(root: Path, attempt: int = 1) -> Path:
    return next((root / "tables" / "loss").glob(f"part-{attempt:05d}-*.parquet"))


def test_the_run_is_well_to_begin_with(run: Path) -> None:
    found = verify_run(run)
    assert found.problems == []
    assert found.rows["loss"] == 13
    assert found.live["loss"] == 8


@pytest.mark.parametrize("make", ["nothing", "file", "empty", "other"])
def test_a_folder_that_is_not_a_run(tmp_path: Path, make: str) -> None:
    path = tmp_path / "x"
    if make == "file":
        path.write_text("")
    if make in ("empty", "other"):
        path.mkdir()
    if make == "other":
        (path / "notes.txt").write_text("hello")
    with pytest.raises(NotARunError, match="is not a run"):
        RunReader(path)
    with pytest.raises(NotARunError):
        RunStore.open(path)
    with pytest.raises(NotARunError):
        RunStore.create(path, resume=True)


def test_a_folder_that_holds_another_run_is_refused(run: Path) -> None:
    with pytest.raises(
        RunExistsError, match=f"{RunReader(run).manifest.run_id}.*host .*, pid .*, started 20"
    ):
        RunStore.create(run)
    (run / "run.json").write_text("{")
    with pytest.raises(RunExistsError, match="cannot be read"):
        RunStore.create(run)
    (run / "run.json").unlink()
    with pytest.raises(RunExistsError, match="holds rows of a run"):
        RunStore.create(run)


@pytest.mark.parametrize("damage", ["missing", "empty", "not json", "wrong type"])
def test_a_manifest_that_is_gone_is_rebuilt_from_the_rows(run: Path, damage: str) -> None:
    before = RunReader(run)
    path = run / "run.json"
    if damage == "missing":
        path.unlink()
    else:
        path.write_text({"empty": "", "not json": "{", "wrong type": '{"run_id": 3}'}[damage])
    shutil.rmtree(run / "attempts")
    reader = RunReader(run)
    assert reader.manifest.rebuilt
    assert reader.manifest.run_id == before.manifest.run_id
    assert abs((reader.manifest.created - before.manifest.created).total_seconds()) < 1
    assert reader.live == before.live
    assert reader.read("loss").equals(before.read("loss"))
    assert "run.json" in str(reader.problems[0])


def test_a_flipped_part_is_named_counted_and_left_out(run: Path) -> None:
    path = part(run)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = verify_run(run)
    assert found.rows["loss"] == 3
    assert found.lost_rows == 10
    assert path.name in str(found.problems[0])
    assert "CRC-32" in found.problems[0].text


def test_a_part_that_is_gone_is_missed(run: Path) -> None:
    path = part(run)
    path.unlink()
    found = verify_run(run)
    assert [(p.lost_rows, path.name in p.where) for p in found.problems if p.kind == "part"] == [(10, True)]


def test_a_part_under_another_name_is_left_out(run: Path) -> None:
    path = part(run)
    path.rename(path.with_name(path.name.replace("00001-r0", "00002-r7")))
    problems = RunReader(run).check_all()
    assert "its name and its metadata disagree" in problems[0].text


def test_a_part_of_another_table_is_left_out(run: Path) -> None:
    path = part(run)
    (run / "tables" / "router").mkdir()
    shutil.copy(path, run / "tables" / "router" / path.name)
    reader = RunReader(run)
    assert reader.read("router").num_rows == 0
    assert "its name and its metadata disagree" in str(reader.check_all()[0])


def test_a_part_of_another_run_is_left_out(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_attempt(other, range(1, 4))
    (alien,) = (other / "tables" / "loss").glob("part-*")
    shutil.copy(alien, run / "tables" / "loss" / alien.name.replace("00001-r0", "00001-r9"))
    reader = RunReader(run)
    assert reader.read("loss", live=False).num_rows == 13
    assert "its name and its metadata disagree" in str(reader.check_all()[0])


def test_the_same_rows_twice_count_once(run: Path) -> None:
    path = part(run)
    copy = path.with_name(path.name[:-16] + "00000000.parquet")
    shutil.copy(path, copy)
    reader = RunReader(run)
    problems = reader.check_all()
    assert any("the same rows" in str(p) for p in problems)


def test_links_are_followed_to_what_is_proven_to_be_of_the_run(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_attempt(other, range(1, 4), seal=False)
    path = part(run)
    outside = tmp_path / "outside.parquet"
    path.rename(outside)
    path.symlink_to(outside)
    (run / "tables" / "router").symlink_to(other / "tables")
    (run / "journal" / "00001-r0-00009.wal").symlink_to(next((other / "journal").glob("*.wal")))
    reader = RunReader(run)
    assert reader.read("loss", live=False).num_rows == 13
    assert not reader.read("router", live=False).num_rows
    (problem,) = reader.check_all()
    assert "its name and its header disagree" in str(problem)
    outside.unlink()  # a cache that was cleared
    with pytest.warns(LeftOutWarning, match=r"rows of table 'loss' are left out: .*No such file"):
        assert read_table(run, "loss", live=False).num_rows == 3


def test_a_journal_of_another_run_is_left_out(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_attempt(other, range(1, 4), seal=False)
    shutil.copy(next((other / "journal").glob("*.wal")), run / "journal" / "00001-r0-00009.wal")
    reader = RunReader(run)
    assert reader.read("loss", live=False).num_rows == 13
    assert any("its name and its header disagree" in str(p) for p in reader.check_all())


def test_unknown_names_are_refused_with_what_there_is(run: Path) -> None:
    with pytest.raises(SchemaError, match="there is no table 'losses'; expected one of loss, router"):
        read_table(run, "losses")
    with pytest.raises(SchemaError, match="no column 'los'; it has run_id, attempt"):
        RunReader(run).read("loss", columns=["los"])


def test_doubled_keys_are_found(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 4))
    with RunStore.open(root) as store:
        writer = store.writer(attempt=1)
        writer.append("loss", {"step": 2, "aggregation_scope": "global"})
    (problem,) = [p for p in verify_run(root).problems if "within" in p.text]
    assert "step=2" in problem.text


def test_a_stale_table_of_attempts_is_found(run: Path) -> None:
    (run / "tables" / "attempt" / "attempts.parquet").unlink()
    (problem,) = verify_run(run).problems
    assert "loopscope seal" in problem.text


def test_a_newer_layout_is_not_written_to(run: Path) -> None:
    change_manifest(run, format=LAYOUT + 1, invented_later={"a": 1})
    with pytest.raises(StoreError, match=f"layout {LAYOUT + 1}"):
        RunStore.open(run)
    reader = RunReader(run)
    assert reader.read("loss").num_rows == 8
    assert [f"layout {LAYOUT + 1}" in str(p) for p in reader.check_all()] == [True]


def test_a_leftover_temporary_file_disturbs_nobody(run: Path) -> None:
    (run / "journal" / "00001-r0-00002.loss.tmp").write_bytes(b"PAR1")
    assert verify_run(run).problems == []


@pytest.mark.parametrize("name", ["é" * 200, "x" * 300], ids=["text that is long in bytes", "long"])
def test_a_name_that_no_disk_takes_is_refused_in_words(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        RunStore.create(tmp_path / name)
    with pytest.raises(NotARunError, match="File name too long"):
        RunReader(tmp_path / name)
    with RunStore.create(tmp_path / "run", run_name=name) as store:
        assert RunReader(store.path).manifest.run_name == name


def test_a_disk_that_was_full_when_the_run_was_made_takes_it_later(tmp_path: Path) -> None:
    class Full(Disk):
        full = True

        def replace(self, source: Path, target: Path) -> None:
            if self.full and target.name == "run.json":
                raise OSError(errno.ENOSPC, "No space left on device")
            super().replace(source, target)

    disk = Full()
    with pytest.raises(ConfigError, match="No space left"):
        RunStore.create(tmp_path / "run", disk=disk)
    disk.full = False
    with RunStore.create(tmp_path / "run", disk=disk) as store:
        disk.full = True
        with pytest.raises(ConfigError, match="No space left"):
            store.claim_attempt(first_step=1)
        disk.full = False
        store.writer(attempt=store.claim_attempt(first_step=1)).append("loss", {"step": 1})
    found = verify_run(tmp_path / "run")
    assert (found.problems, found.rows["loss"]) == ([], 1)


def test_a_part_in_another_tables_folder_is_named_and_missed(run: Path) -> None:
    path = part(run)
    (run / "tables" / "residual").mkdir()
    path.rename(run / "tables" / "residual" / path.name)
    found = verify_run(run)
    assert found.lost_rows == 10
    assert {p.where.split("/")[1] for p in found.problems} == {"loss", "residual"}


def test_links_on_the_way_to_the_run_are_the_users_own(run: Path, tmp_path: Path) -> None:
    (tmp_path / "parent").symlink_to(run.parent)
    (tmp_path / "itself").symlink_to(run)
    for path in (tmp_path / "parent" / run.name, tmp_path / "itself"):
        assert verify_run(path).problems == []
        assert open_run(path).sql("select count(*) from loss").fetchall() == [(8,)]


def test_documents_that_are_no_files_are_named(run: Path) -> None:
    for name in ("run.json", "attempts/00001.json", next(run.glob("journal/*.sealed")).relative_to(run)):
        (run / name).unlink()
        (run / name).mkdir()
    reader = RunReader(run)
    assert {p.kind for p in reader.check_all()} >= {"manifest", "attempt", "journal"}


def test_a_clock_that_jumped_back_between_attempts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 10**17)
    monkeypatch.setattr(time, "time", lambda: 1e8)
    write_attempt(run, range(7, 12), parent=2)
    found = verify_run(run)
    assert (found.problems, found.live["loss"]) == ([], 11)


def test_many_attempts_are_one_chain(tmp_path: Path) -> None:
    for number in range(30):
        write_attempt(
            tmp_path / "run", range(1 + number, 4 + number), parent=number or None, seal=number % 3 > 0
        )
    found = verify_run(tmp_path / "run")
    assert found.problems == []
    assert RunReader(tmp_path / "run").read("loss")["step"].to_pylist() == list(range(1, 33))
