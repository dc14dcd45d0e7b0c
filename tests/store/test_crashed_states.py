"""What a process leaves that ended in the middle is not wrong: `verify` says so, and says what is."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_runs import QUIET, loss, write_attempt

from loopscope.cli.verify import Verify
from loopscope.store import RunReader, RunStore, StoreOptions
from loopscope.store.disk import Disk
from loopscope.store.read.verify import ATTEMPT_TABLE, verify_run
from loopscope.store.seal.seal_journal import seal_journal
from loopscope.store.seal.seal_run import seal_run


def seal_and_die(root: Path) -> None:
    """Every journal becomes parts, and the process is killed before the table of attempts is written."""
    for path in sorted(root.glob("journal/*.wal")):
        seal_journal(root, path.name)


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_a_kill_between_sealing_and_the_table_of_attempts_is_a_note(
    tmp_path: Path, attempts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    for number in range(attempts):
        write_attempt(root, range(1 + 3 * number, 6 + 3 * number), parent=number or None, seal=False)
    seal_and_die(root)
    found = verify_run(root)
    assert found.problems == []
    assert ["loopscope seal" in str(n) for n in found.notes] == [True]
    assert Verify(path=root).run() == 0
    assert "note (live)" in capsys.readouterr().out
    seal_run(root)
    assert (verify_run(root).problems, verify_run(root).notes) == ([], [])


def test_a_kill_between_a_claim_and_the_table_of_attempts_is_a_note(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 6))
    before = (root / ATTEMPT_TABLE).read_bytes()
    write_attempt(root, range(4, 8), parent=1, seal=False)
    (root / ATTEMPT_TABLE).write_bytes(before)
    found = verify_run(root)
    assert (found.problems, len(found.notes)) == ([], 1)


@pytest.mark.parametrize(
    "lie",
    [{"live_to": 2}, {"live_from": 1}, {"attempt": 9}, {"first_step": 2}, {"live_from": None, "live_to": 4}],
)
def test_a_table_of_attempts_that_never_was_true_is_wrong(tmp_path: Path, lie: dict[str, Any]) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 6))
    table = pq.read_table(root / ATTEMPT_TABLE)
    rows = [{**row, **lie} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), root / ATTEMPT_TABLE)
    assert [p.kind for p in verify_run(root).problems] == ["live"]
    seal_run(root)
    assert verify_run(root).problems == []


class NoNewFiles(Disk):
    """A disk without room for another file."""

    full = False

    def create(self, path: Path) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def test_a_journal_that_could_not_be_made_is_not_missed(tmp_path: Path) -> None:
    root, disk = tmp_path / "run", NoNewFiles()
    store = RunStore.create(root, disk=disk, options=StoreOptions(tick_s=3600.0, rotate_bytes=200))
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for step in range(1, 10):
        disk.full = 4 <= step <= 6
        writer.append("loss", loss(step))
    store.close()
    assert writer.dropped == 3
    assert RunReader(root).read("loss").num_rows == 6
    assert verify_run(root).problems == []


@pytest.mark.parametrize("size", [0, 7, 20])
def test_a_kill_inside_a_journals_first_record_is_not_missed(tmp_path: Path, size: int) -> None:
    root = tmp_path / "run"
    store = RunStore.create(root, options=QUIET)
    attempt = store.claim_attempt(first_step=1)
    for step in (1, 2):
        writer = store.writer(attempt=attempt)
        writer.append("loss", loss(step))
        writer.close(seal=False)
    store.close(seal=False)
    first, second = sorted(root.glob("journal/*.wal"))
    first.write_bytes(first.read_bytes()[:size])
    for _ in range(2):
        assert RunReader(root).read("loss")["step"].to_pylist() == [2]
        assert verify_run(root).problems == []
        report = seal_run(root)
        assert report.failures == []
    assert not second.exists()
