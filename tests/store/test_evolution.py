"""Schema versions: old and new files read together, newer files as far as they are understood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from store_runs import QUIET, loss, write_attempt

from loopscope import __version__
from loopscope.analysis.sql_views import SqlViews
from loopscope.errors import SchemaError
from loopscope.store import TABLES, Column, RunReader, RunStore, TableSchema
from loopscope.store.seal.seal_run import seal_run

OLD = TABLES["loss"]
NEW = replace(
    OLD,
    columns=(*OLD.columns, Column(name="later", formula="new", since=OLD.version + 1)),
    version=OLD.version + 1,
)
NEWER: Mapping[str, TableSchema] = {**TABLES, "loss": NEW}


@pytest.fixture(params=[True, False], ids=["sealed", "journal"])
def both(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    root = tmp_path / "run"
    write_attempt(root, range(1, 4), seal=request.param)
    write_attempt(root, range(4, 6), parent=1, seal=request.param, tables=NEWER, later=0.5)
    return root


def test_old_and_new_files_read_together(both: Path) -> None:
    reader = RunReader(both, tables=NEWER)
    table = reader.read("loss")
    assert table["later"].to_pylist() == [None, None, None, 0.5, 0.5]
    assert table.schema.names == list(NEW.names)
    assert reader.check_all() == []


def test_sql_over_both_versions(both: Path) -> None:
    import duckdb

    with duckdb.connect() as connection:
        views = SqlViews(connection, [RunReader(both, tables=NEWER)])
        query = "select step, later from loss order by step"
        views.ensure(query)
        assert views.connection.sql(query).fetchall() == [(1, None), (2, None), (3, None), (4, 0.5), (5, 0.5)]


def test_a_newer_version_is_read_as_far_as_it_is_known_and_the_rest_is_named(both: Path) -> None:
    reader = RunReader(both)
    table = reader.read("loss")
    assert table["step"].to_pylist() == [1, 2, 3, 4, 5]
    assert "later" not in table.column_names
    problems = reader.check_all()
    assert [p.kind for p in problems] == ["schema"]
    assert "later" in problems[0].text
    assert problems[0].lost_rows == 0


def test_sealing_a_newer_journal_is_refused_rather_than_losing_columns(tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_attempt(root, range(1, 3), seal=False, tables=NEWER, later=1.0)
    report = seal_run(root)
    assert f"newer schemas {{'loss': {NEW.version}}}" in report.failures[0]
    assert RunReader(root, tables=NEWER).read("loss")["later"].to_pylist() == [1.0, 1.0]


def test_every_file_says_what_it_is(both: Path) -> None:
    seal_run(both)
    for path in both.glob("tables/*/*.parquet"):
        metadata = {k.decode(): v.decode() for k, v in pq.read_schema(path).metadata.items()}
        assert metadata["loopscope.table"] == path.parent.name
        assert metadata["loopscope.schema_version"] in {str(t.version) for t in NEWER.values()} | {
            str(OLD.version)
        }
        assert metadata["loopscope.run_id"] == RunReader(both).manifest.run_id
        assert metadata["loopscope.loopscope_version"] == __version__


def test_files_use_plain_types_and_carry_page_checksums(both: Path) -> None:
    seal_run(both)
    path = next(both.glob("tables/loss/part-00001*.parquet"))
    kinds = {str(f.type) for f in pq.read_schema(path)}
    assert kinds <= {"string", "int32", "int64", "double", "timestamp[us, tz=UTC]"}
    # Damage inside a page is found by the checksum of the page alone.
    data = bytearray(path.read_bytes())
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(OLD.names.index("task_loss"))
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start + chunk.total_compressed_size - 1] ^= 4
    damaged = path.with_name("damaged")
    damaged.write_bytes(data)
    with pytest.raises(OSError, match=r"[Cc]hecksum|CRC|orrupt|ecompress"):
        pq.read_table(damaged, page_checksum_verification=True)


def test_a_writer_of_an_older_version_refuses_the_new_column(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        with pytest.raises(SchemaError, match="unknown field `later`"):
            writer.append("loss", loss(1, later=1.0))
