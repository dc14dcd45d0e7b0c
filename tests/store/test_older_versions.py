"""Files of older versions are refused by name, and nothing of them is read: layout 1, journals of format 2, old tables.

`data/layout-1` was written by loopscope 0.1.0 before layout 2: attempt 1 sealed, with router at version 2; attempt 2
in a journal of format 2; two steps each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from store_runs import QUIET, visit

from loopscope.analysis import open_runs
from loopscope.errors import NotARunError, RunExistsError, SchemaError
from loopscope.store import TABLES, RunReader, RunStore, TableSchema
from loopscope.store.journal.file import read_journal
from loopscope.store.journal.frames import Frame, Gap, encode_frames, journal_header, scan
from loopscope.store.read.compact import compact_run
from loopscope.store.read.verify import verify_run
from loopscope.store.seal.seal_journal import seal_journal
from loopscope.store.seal.seal_run import seal_run

OLD = Path(__file__).parent / "data" / "layout-1"
JOURNAL = "journal/00002-r0-00001.wal"


def tables_from(oldest: int) -> Mapping[str, TableSchema]:
    """The registry, with a router table that is read from a version on."""
    router = replace(TABLES["router"], version=max(oldest, TABLES["router"].version), oldest=oldest)
    return {**TABLES, "router": router}


TABLES_NOW = tables_from(3)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "old"))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """A run of this version under the old one's id."""
    run_id = json.loads((OLD / "run.json").read_text())["run_id"]
    store = RunStore.create(tmp_path / "new", run_id=run_id, options=QUIET)
    for number in (1, 2):
        store.claim_attempt(first_step=number, parent_attempt=number - 1 or None)
    store.close()
    return store.path


def content(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("use", [RunReader, RunStore.open, seal_run, verify_run, compact_run])
def test_a_run_of_layout_1_is_refused_and_left_as_it_is(old: Path, use) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        SchemaError, match=r"layout 1, written by loopscope 0\.1\.0; this version reads layout 2"
    ):
        use(old)
    assert content(old) == content(OLD)


def test_a_run_of_layout_1_among_others_is_skipped_with_the_reason(old: Path, new: Path) -> None:
    runs = open_runs(old.parent / "*")
    assert [run.path for run in runs] == [new]
    assert ["layout 1" in reason for reason in runs.skipped] == [True]


def test_no_run_is_made_in_the_place_of_one_of_layout_1(old: Path) -> None:
    with pytest.raises(RunExistsError, match="layout 1"):
        RunStore.create(old)
    assert content(old) == content(OLD)


def test_a_lost_run_json_is_not_rebuilt_from_files_of_older_versions(old: Path) -> None:
    (old / "run.json").unlink()
    shutil.rmtree(old / "tables" / "loss")
    with pytest.raises(NotARunError):
        RunReader(old, tables=TABLES_NOW)


def test_a_journal_of_format_2_is_named_and_nothing_of_it_is_read_or_sealed(new: Path) -> None:
    shutil.copy(OLD / JOURNAL, new / JOURNAL)
    reader = RunReader(new)
    assert [reader.read(t, live=False).num_rows for t in ("loss", "router")] == [0, 0]
    (problem,) = reader.check_all()
    assert (problem.kind, problem.lost_rows) == ("schema", None)
    assert "format 2, written by loopscope 0.1.0; this version reads format 3" in problem.text
    (failure,) = seal_run(new).failures
    assert "format 2" in failure
    assert (new / JOURNAL).read_bytes() == (OLD / JOURNAL).read_bytes()


def test_no_record_of_a_journal_of_format_2_is_taken_for_one_of_this_format(new: Path) -> None:
    data = bytearray((OLD / JOURNAL).read_bytes())
    assert [type(piece) for piece in scan(bytes(data))] == [Frame, Gap]
    data[30] ^= 1  # in the header, which alone says the format
    (new / JOURNAL).write_bytes(data)
    reader = RunReader(new)
    assert reader.read("loss", live=False).num_rows == 0
    assert any("are damaged" in str(problem) for problem in reader.check_all())


def test_a_part_of_an_older_table_version_is_named_and_left_out(new: Path) -> None:
    (path,) = (OLD / "tables" / "router").glob("part-*")
    (new / "tables" / "router").mkdir()
    shutil.copy(path, new / "tables" / "router" / path.name)
    reader = RunReader(new, tables=TABLES_NOW)
    assert reader.read("router", live=False).num_rows == 0
    (problem,) = reader.check_all()
    assert (problem.kind, problem.where) == ("schema", f"tables/router/{path.name}")
    assert "schema version 2, written by loopscope 0.1.0; this version reads version 3" in problem.text


def test_a_journal_with_an_older_table_version_is_named_and_kept(tmp_path: Path) -> None:
    root = tmp_path / "run"
    store = RunStore.create(root, options=QUIET)
    store.writer(attempt=store.claim_attempt(first_step=1)).append("router", visit(1))
    store.close(seal=False)
    (path,) = root.glob("journal/*.wal")
    data = path.read_bytes()
    header = journal_header(data)
    assert header is not None
    assert header.schemas["router"] < 9
    later = tables_from(9)
    reader = RunReader(root, tables=later)
    assert reader.read("router").num_rows == 0
    (problem,) = reader.check_all()
    assert f"router {header.schemas['router']} (read from 9 on)" in problem.text
    with pytest.raises(SchemaError, match="older versions of tables"):
        seal_journal(root, path.name, tables=later)
    assert path.read_bytes() == data


def test_a_header_of_any_format_is_read(tmp_path: Path) -> None:
    header = journal_header(read_journal(OLD / JOURNAL))
    assert header is not None
    assert header.format == 2
    assert journal_header(encode_frames(0, [msgspec.msgpack.encode(header)])) == header
