"""Records by position become Arrow columns, in order, over chunks and changes of columns; a bad row alone is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_runs import write_attempt

from loopscope.store import TABLES, RunReader
from loopscope.store.journal.decode import CHUNK_ROWS, JournalColumns
from loopscope.store.journal.file import read_journal
from loopscope.store.journal.frames import Frame, encode_frames, scan
from loopscope.store.read.verify import verify_run
from loopscope.store.seal.seal_run import seal_run

KEYS = {"run_id": "it", "attempt": 7}
LOSS = TABLES["loss"].arrow
OLDER, NEWER = ("step", "task_loss"), ("step", "lr", "later")


def rows_of(columns: JournalColumns, table: str = "loss") -> list[dict[str, Any]]:
    return pa.concat_tables(columns.tables().get(table, []) or [LOSS.empty_table()]).to_pylist()


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([OLDER, NEWER]), st.one_of(st.none(), st.floats(-1e9, 1e9), st.just("no number"))
        ),
        max_size=30,
    )
)
def test_any_rows_come_back_in_order_and_what_does_not_fit_is_counted(rows: list[tuple[Any, Any]]) -> None:
    columns = JournalColumns(TABLES, KEYS)
    expected = []
    for step, (names, value) in enumerate(rows):
        row = dict(zip(names, [step, value, 1.0][: len(names)], strict=True))
        columns("loss", names, list(row.values()))
        if value != "no number":
            empty = dict.fromkeys(LOSS.names)
            expected.append({**empty, **KEYS, **{k: v for k, v in row.items() if k in LOSS.names}})
    assert rows_of(columns) == expected
    assert columns.misfits == ({"loss": len(rows) - len(expected)} if len(expected) < len(rows) else {})
    unknown = {"loss": {"later"}} if any(n == NEWER and v != "no number" for n, v in rows) else {}
    assert columns.unknown_columns == unknown


def test_rows_are_converted_a_chunk_at_a_time() -> None:
    columns = JournalColumns(TABLES, KEYS)
    for step in range(2 * CHUNK_ROWS + 1):
        columns("loss", OLDER, [step, 0.5])
        columns("nowhere", ("a",), [1])
    assert [t.num_rows for t in columns.tables()["loss"]] == [CHUNK_ROWS, CHUNK_ROWS, 1]
    assert [row["step"] for row in rows_of(columns)] == list(range(2 * CHUNK_ROWS + 1))
    assert columns.unknown_tables == {"nowhere": 2 * CHUNK_ROWS + 1}


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_row_that_does_not_fit_its_table_costs_itself_alone(tmp_path: Path, bad: int) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 6), seal=False)
    (path,) = root.glob("journal/*.wal")
    frames = [piece for piece in scan(read_journal(path)) if isinstance(piece, Frame)]
    payloads = [frame.payload for frame in frames]
    table, row = msgspec.msgpack.decode(payloads[bad + 1])
    place = TABLES["loss"].names.index("task_loss")
    row = {**row, "task_loss": "text"} if bad == 0 else [*row[:place], "text", *row[place + 1 :]]
    payloads[bad + 1] = msgspec.msgpack.encode((table, row))
    path.write_bytes(encode_frames(0, payloads))
    left = [step for step in range(1, 6) if step != bad + 1]
    assert RunReader(root).read("loss")["step"].to_pylist() == left
    assert verify_run(root).lost_rows == 1
    (sealed,) = seal_run(root).sealed
    assert (sealed.rows, sealed.lost) == (4, 1)
    assert RunReader(root).read("loss")["step"].to_pylist() == left
