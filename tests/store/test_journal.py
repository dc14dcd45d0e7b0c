"""Rows by position: the first row of each table names the columns, and losing it loses nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_runs import QUIET, loss, visit

from loopscope.errors import StoreError
from loopscope.store import TABLES, Column, RunStore, TableSchema
from loopscope.store.disk import LOCAL_DISK, Disk
from loopscope.store.journal.decode import JournalContent, decode_journal
from loopscope.store.journal.file import Journal, read_journal
from loopscope.store.journal.frames import FORMAT, HEAD_SIZE, Frame, JournalHeader, encode_frames, scan
from loopscope.store.read.verify import verify_run
from loopscope.store.seal.seal_run import seal_run

OLD = TABLES["loss"]
NEWER = {
    **TABLES,
    "loss": replace(
        OLD,
        columns=(*OLD.columns, Column(name="later", formula="new", since=OLD.version + 1)),
        version=OLD.version + 1,
    ),
}
ROWS = [("loss", loss(1)), ("router", visit(1)), ("loss", loss(2)), ("router", visit(2)), ("loss", loss(3))]
Rows = list[tuple[str, dict[str, Any]]]


def write(root: Path, tables: Mapping[str, TableSchema] = TABLES, **more: Any) -> Path:
    store = RunStore.create(root, options=QUIET, tables=tables)
    writer = store.writer(attempt=store.claim_attempt(first_step=1))
    for table, row in ROWS:
        writer.append(table, {**row, **more} if table == "loss" else row)
    store.close(seal=False)
    return next(root.glob("journal/*.wal"))


def read(data: bytes, tables: Mapping[str, TableSchema] = TABLES) -> tuple[Rows, JournalContent]:
    rows: Rows = []

    def take(table: str, names: tuple[str, ...], values: list[Any]) -> None:
        row = dict(zip(names, values, strict=True))
        rows.append((table, {k: v for k, v in row.items() if v is not None and k != "wall_time"}))

    return rows, decode_journal("it", data, tables, take)


def without(data: bytes, ordinals: set[int]) -> bytes:
    """The file with a flipped bit in the payload of some records."""
    damaged = bytearray(data)
    for frame in scan(data):
        assert isinstance(frame, Frame)
        if frame.ordinal in ordinals:
            damaged[frame.end - len(frame.payload) + 3] ^= 1
    return bytes(damaged)


def plain(rows: Rows) -> Rows:
    return [(table, {k: v for k, v in row.items() if v is not None}) for table, row in rows]


def test_names_are_written_once_per_table(tmp_path: Path) -> None:
    data = read_journal(write(tmp_path / "run"))
    kinds = [
        type(msgspec.msgpack.decode(f.payload)[1]) for f in scan(data) if isinstance(f, Frame) and f.ordinal
    ]
    assert kinds == [dict, dict, list, list, list]
    rows, content = read(data)
    assert rows == plain(ROWS)
    assert (content.faults, content.lost, content.num_rows) == ([], 0, 5)


@pytest.mark.parametrize("lost", [s for n in range(4) for s in itertools.combinations(range(4), n)])
def test_every_record_that_is_damaged_is_lost_alone(tmp_path: Path, lost: tuple[int, ...]) -> None:
    rows, content = read(without(read_journal(write(tmp_path / "run")), set(lost)))
    assert rows == plain([row for number, row in enumerate(ROWS, 1) if number not in lost])
    assert content.lost == len(lost)
    assert (content.header is None) == (0 in lost)


def test_columns_of_a_newer_version_are_known_by_their_names_alone(tmp_path: Path) -> None:
    data = read_journal(write(tmp_path / "run", NEWER, later=0.5))
    rows, content = read(data)
    assert [row for table, row in rows if table == "loss"] == [{**loss(s), "later": 0.5} for s in (1, 2, 3)]
    assert content.lost == 0
    rows, content = read(without(data, {1}))
    assert [table for table, _ in rows] == ["router", "router"]
    assert content.lost == 3
    assert f"a row of 'loss' has {len(NEWER['loss'].columns)} values" in content.faults[-1]
    assert read(without(data, {1}), NEWER)[1].lost == 1


def test_columns_of_an_older_version_are_known_by_their_number(tmp_path: Path) -> None:
    data = without(read_journal(write(tmp_path / "run")), {1})
    rows, content = read(data, NEWER)
    assert [row for table, row in rows if table == "loss"] == [loss(2), loss(3)]
    assert content.lost == 1


def test_every_version_of_every_table_has_its_own_number_of_columns() -> None:
    for schema in TABLES.values():
        assert len(schema.orders) == schema.version - schema.oldest + 1
        assert (
            tuple(f.name for f in msgspec.structs.fields(schema.row_type)) == schema.orders[len(schema.names)]
        )


class Refusing(Disk):
    """Refuses the n-th write, or takes a part of it."""

    def __init__(self, number: int, part: int) -> None:
        self.left, self.part = number, part

    def write(self, fd: int, data: bytes) -> int:
        self.left -= 1
        if self.left == 0:
            super().write(fd, data[: self.part])
            raise OSError(28, "No space left on device")
        return super().write(fd, data)


@pytest.mark.parametrize("part", [0, 40])
@pytest.mark.parametrize("number", range(2, 7))
def test_names_that_did_not_reach_the_disk_are_written_again(tmp_path: Path, number: int, part: int) -> None:
    store = RunStore.create(tmp_path / "run", options=QUIET)
    attempt = store.claim_attempt(first_step=1)
    store._disk = Refusing(number, part)
    writer = store.writer(attempt=attempt)
    kept = []
    for table, row in ROWS:
        try:
            writer.append(table, row)
        except StoreError:
            continue
        kept.append((table, row))
    store.close(seal=False)
    assert len(kept) == 4
    rows, content = read(read_journal(next((tmp_path / "run").glob("journal/*.wal"))))
    told = rows.pop()
    assert (told[0], told[1]["event"], told[1]["count"]) == ("health", "dropped_rows", 1)
    assert rows == plain(kept)
    assert content.faults == []


_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "task_loss": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        "tokens_seen": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        "null_reasons": st.one_of(st.none(), st.text()),
        "rank": st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
    },
)


@settings(max_examples=60)
@given(st.lists(st.lists(_VALUES, min_size=1, max_size=5), min_size=1, max_size=6))
def test_rows_of_any_batches_come_back(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Any]]
) -> None:
    header = JournalHeader(
        run_id="it", attempt=1, parent_attempt=None, first_step=1, world_size=1, writer="r0", seq=1,
        schemas={"loss": OLD.version}, loopscope_version="1",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("any") / "it.wal"
    journal = Journal(LOCAL_DISK, path, header)
    kind = OLD.row_type
    rows: Rows = []
    for batch in batches:
        journal.append("loss", [kind(step=1, wall_time=None, **values) for values in batch])
        rows += [("loss", {"step": 1, **values}) for values in batch]
    LOCAL_DISK.close(journal.fd)
    got, content = read(read_journal(path))
    assert got == plain(rows)
    assert (content.lost, content.num_rows, path.stat().st_size) == (0, len(rows), journal.size)
    assert HEAD_SIZE * (len(rows) + 1) < journal.size


def test_a_journal_of_a_newer_format_is_named_left_out_and_not_sealed(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    header = read(read_journal(path))[1].header
    assert header is not None
    encode = msgspec.msgpack.encode
    later = msgspec.structs.replace(header, format=FORMAT + 1, loopscope_version="9.9")
    data = encode_frames(0, [encode(later), *[encode(["unheard of", 7, b"bytes"])] * 1000])
    path.write_bytes(data)
    found = verify_run(tmp_path / "run")
    assert [(p.kind, p.lost_rows) for p in found.problems] == [("schema", None)]
    assert f"format {FORMAT + 1}, written by loopscope 9.9" in str(found.problems[0])
    assert "format" in seal_run(tmp_path / "run").failures[0]
    assert path.read_bytes() == data


def test_a_file_full_of_nonsense_is_told_in_a_few_words(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    header = next(iter(scan(read_journal(path))))
    assert isinstance(header, Frame)
    path.write_bytes(encode_frames(0, [header.payload, *[msgspec.msgpack.encode([7])] * 1000]))
    (problem,) = verify_run(tmp_path / "run").problems
    assert problem.lost_rows == 1000
    assert problem.text.endswith("980 more")
    assert len(problem.text) < 3000


@pytest.mark.parametrize("lost", [{1}, {1, 2}, {3, 5}, {1, 2, 3, 4}])
def test_what_a_damaged_journal_lost_is_counted_once_before_and_after_it_is_sealed(
    tmp_path: Path, lost: set[int]
) -> None:
    path = write(tmp_path / "run")
    path.write_bytes(without(read_journal(path), lost))
    assert verify_run(tmp_path / "run").lost_rows == len(lost)
    (sealed,) = seal_run(tmp_path / "run").sealed
    assert (sealed.rows, sealed.lost) == (5 - len(lost), len(lost))
    found = verify_run(tmp_path / "run")
    assert found.lost_rows == len(lost)
    assert sum(found.rows.values()) == 5 - len(lost) + 1  # and the attempt
    assert [p.kind for p in found.problems] == ["journal", "journal"]
    # Where the count is lost too, a part still says it.
    next((tmp_path / "run").glob("journal/*.sealed")).unlink()
    assert verify_run(tmp_path / "run").lost_rows == len(lost)


@pytest.mark.parametrize("kind", ["zeros", "every record"])
def test_a_journal_of_which_nothing_is_left_is_kept_and_missed(tmp_path: Path, kind: str) -> None:
    """A machine that lost its power may leave a file of the right length that was never filled."""
    path = write(tmp_path / "run")
    data = read_journal(path)
    path.write_bytes(bytes(len(data)) if kind == "zeros" else without(data, set(range(6))))
    assert verify_run(tmp_path / "run").lost_rows > 0
    (sealed,) = seal_run(tmp_path / "run").sealed
    assert sealed.lost > 0
    assert path.with_name(path.name + ".damaged").exists()
    assert verify_run(tmp_path / "run").lost_rows == sealed.lost
