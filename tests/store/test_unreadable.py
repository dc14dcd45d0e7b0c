"""Files that vanish, that may not be read, that lie elsewhere: never an empty table, and never a word too late."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from store_runs import write_attempt

from loopscope.analysis import Run, open_run, open_runs
from loopscope.errors import LeftOutWarning, UnreadableError
from loopscope.store import RunStore

WAYS: dict[str, Callable[[Any], Any]] = {
    "arrow": lambda run: run.arrow("loss").num_rows,
    "polars": lambda run: run.polars("loss").height,
    "pandas": lambda run: len(run.pandas("loss")),
    "sql": lambda run: run.sql("select count(*) from loss").fetchall()[0][0],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "runs" / "one"
    write_attempt(root, range(1, 11))
    write_attempt(root, range(11, 14), parent=1)
    return root


def parts(run: Path) -> list[Path]:
    return sorted((run / "tables" / "loss").glob("part-*"))


@pytest.mark.parametrize("way", WAYS)
def test_a_program_may_change_its_folder(run: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.chdir(run.parent.parent)
    one, several = open_run("runs/one"), open_runs("runs/*")
    monkeypatch.chdir("/")
    assert WAYS[way](one) == WAYS[way](several[0]) == 13
    assert one.refresh().run_id == one.run_id


@pytest.mark.parametrize("way", WAYS)
def test_files_that_vanish_are_an_error_or_named_in_the_answer(run: Path, way: str) -> None:
    opened, whole = open_run(run), open_run(run, partial=True)
    parts(run)[0].unlink()
    with pytest.warns(LeftOutWarning, match=r"rows of table 'loss' are left out: tables/loss/part-00001"):
        assert WAYS[way](opened) == 3
    assert WAYS[way](whole) == 3
    opened = open_run(run)  # the ledger knows of the one that is gone
    with pytest.warns(LeftOutWarning, match=r"is not there any more \[10 row\(s\) lost\]"):
        assert WAYS[way](opened) == 3
    opened = open_run(run)
    shutil.rmtree(run / "tables")
    with pytest.raises(UnreadableError, match=r"Nothing of it could be read.*partial=True"):
        WAYS[way](opened)


def test_a_table_that_was_never_written_is_empty(run: Path) -> None:
    opened = open_run(run)
    assert opened.arrow("router").num_rows == 0
    assert opened.sql("select * from router").fetchall() == []


def test_a_run_of_links_is_whole(run: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    for path in (path for path in run.rglob("*") if path.is_file()):
        blob, link = tmp_path / "blobs" / f"{abs(hash(path))}", linked / path.relative_to(run)
        for folder in (blob.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(blob)
    opened = open_run(linked)
    assert all(way(opened) == 13 for way in WAYS.values())
    assert opened.problems == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_what_a_user_may_not_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for name in ("open", "closed", "table"):
        write_attempt(folder / name, range(1, 6))
    (folder / "closed").chmod(0o700)
    (folder / "table" / "tables" / "loss").chmod(0o700)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o755)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(54321)
        os.setuid(54321)
        try:
            found = open_runs(folder / "*")
            with pytest.warns(LeftOutWarning, match=r"tables/loss: cannot be read \(Permission denied\)"):
                rows = found.arrow("loss").num_rows
            said = f"{len(found)} {rows} {len(found.skipped)} {'closed' in found.skipped[0]}"
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 5000).decode() == "2 5 1 True"


def test_a_folder_whose_name_is_no_text_is_written_and_read(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"latin-\xe9")
    try:
        write_attempt(root, range(1, 6))
    except OSError:
        pytest.skip("this disk takes valid names alone")
    opened = open_run(root)
    assert opened.manifest.run_name == "latin-?"
    assert all(way(opened) == 5 for way in WAYS.values())


def test_threads_share_a_run(run: Path) -> None:
    opened = open_run(run)
    started = threading.Barrier(8)

    def ask(number: int) -> bool:
        if number < 8:
            started.wait()
        step = number % 13 + 1
        return bool(
            opened.sql(f"select count(*) from loss where step <= {step}").fetchall() == [(step,)]
            and opened.arrow("loss").num_rows == 13
            and opened.sql("select count(*) from attempt").fetchall() == [(2,)]
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(200)))
    assert opened.problems == []


def test_a_run_is_sent_to_another_process_and_opened_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    opened, several = open_run("one", partial=True), open_runs("*")
    opened.sql("select 1 from loss").fetchall()
    sent = pickle.dumps([opened, several])
    monkeypatch.chdir("/")
    one, more = pickle.loads(sent)
    assert isinstance(one, Run)
    assert (one.arrow("loss").num_rows, more.arrow("loss").num_rows) == (13, 13)
    assert one._partial


def test_a_branch_never_comes_before_what_it_left(tmp_path: Path) -> None:
    late, early = "01990000-0000-7000-8000-000000000000", "01980000-0000-7000-8000-000000000000"
    for run_id, parent in ((late, None), (early, late)):
        with RunStore.create(tmp_path / run_id[:4], run_id=run_id) as store:
            store.update_manifest(parent_run_id=parent, parent_step=None if parent is None else 5)
    assert [run.run_id for run in open_runs(tmp_path / "*")] == [late, early]


def test_a_system_that_cannot_hold_folders_open_reads_and_says_why_it_does_not_write(run: Path) -> None:
    code = f"""
import os, sys
for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY"):
    delattr(os, name)
from loopscope import open_run
assert open_run({str(run)!r}).arrow("loss").num_rows == 13
from loopscope.errors import UnsupportedError
from loopscope.store import RunStore
try:
    RunStore.create({str(run.parent / "new")!r})
except UnsupportedError as error:
    assert "POSIX" in str(error)
else:
    sys.exit("written")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
