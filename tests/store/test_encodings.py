"""What repeats is encoded as such, what does not is left alone; the rows are the same either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_runs import QUIET, loss, visit

from loopscope.store import TABLES, RunReader, RunStore
from loopscope.store.parts.parquet import parquet_bytes, parquet_options

ROWS = 5000
GENERATOR = np.random.default_rng(0)
FULL = GENERATOR.normal(2.0, 0.1, ROWS)

COLUMNS: dict[str, tuple[Any, bool, str]] = {
    # values, has a dictionary, compression
    "full precision": (FULL, False, "UNCOMPRESSED"),
    "of single precision": (FULL.astype(np.float32).astype(np.float64), False, "ZSTD"),
    "constant": (np.full(ROWS, 0.25), True, "ZSTD"),
    "a few values": (GENERATOR.integers(0, 9, ROWS) / 7, True, "ZSTD"),
    "null": ([None] * ROWS, True, "ZSTD"),
    "full precision, half null": ([v if i % 2 else None for i, v in enumerate(FULL)], False, "UNCOMPRESSED"),
}


def write(path: Path, table: pa.Table, pieces: int = 1) -> pq.ParquetFile:
    size = -(-table.num_rows // pieces)
    tables = [table.slice(start, size) for start in range(0, table.num_rows, size)]
    path.write_bytes(parquet_bytes(table.schema, tables))
    return pq.ParquetFile(path)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_column_is_encoded_as_its_values_are(tmp_path: Path, name: str, pieces: int) -> None:
    values, dictionary, compression = COLUMNS[name]
    table = pa.table({"x": pa.array(values, pa.float64())})
    file = write(tmp_path / "x", table, pieces)
    chunk = file.metadata.row_group(0).column(0)
    assert ("RLE_DICTIONARY" in chunk.encodings, chunk.compression) == (dictionary, compression)
    assert file.read().equals(table)


def test_the_choice_costs_few_bytes_at_most(tmp_path: Path) -> None:
    for name, (values, _, _) in COLUMNS.items():
        table = pa.table({"x": pa.array(values, pa.float64())})
        (tmp_path / "ours").unlink(missing_ok=True)
        write(tmp_path / "ours", table)
        for dictionary in (True, False):
            pq.write_table(table, tmp_path / "theirs", compression="zstd", use_dictionary=dictionary)
            ratio = (tmp_path / "ours").stat().st_size / (tmp_path / "theirs").stat().st_size
            assert ratio < 1.2, (name, dictionary, ratio)


def test_lists_integers_and_texts(tmp_path: Path) -> None:
    lists = FULL[:4000].astype(np.float32).reshape(1000, 4).tolist()
    schema = pa.schema(
        [
            ("measured", pa.list_(pa.field("element", pa.float32()))),
            ("counted", pa.list_(pa.field("element", pa.int64()))),
            ("step", pa.int64()),
            ("word", pa.string()),
        ]
    )
    columns = {
        "measured": lists,
        "counted": [[i, 2] for i in range(1000)],
        "step": range(1000),
        "word": ["a"] * 1000,
    }
    table = pa.table(
        {name: pa.array(list(v), schema.field(name).type) for name, v in columns.items()}, schema=schema
    )
    group = write(tmp_path / "x", table).metadata.row_group(0)
    found = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert "RLE_DICTIONARY" not in found["measured.list.element"].encodings
    assert {p for p, c in found.items() if c.compression != "ZSTD"} <= {"measured.list.element"}
    assert pq.read_table(tmp_path / "x").equals(table)


@pytest.mark.parametrize("table", list(TABLES))
def test_every_column_of_every_table_is_named(table: str) -> None:
    schema = TABLES[table].arrow
    options = parquet_options(schema, schema.empty_table())
    assert len(options["compression"]) == len(schema)
    assert set(options["compression"].values()) == {"zstd"}
    assert options["use_dictionary"] == list(options["compression"])


def test_sealed_parts_are_encoded_so(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with RunStore.create(root, options=QUIET) as store:
        writer = store.writer(attempt=store.claim_attempt(first_step=1))
        for step in range(1, 301):
            writer.append("loss", loss(step, float(FULL[step]), lr=1e-3))
            writer.append("router", visit(step, mean_prob=FULL[step : step + 4].tolist()))
    path = next(root.glob("tables/loss/*.parquet"))
    group = pq.ParquetFile(path).metadata.row_group(0)
    codecs = {group.column(i).path_in_schema: group.column(i).compression for i in range(group.num_columns)}
    assert (codecs["task_loss"], codecs["lr"], codecs["step"]) == ("UNCOMPRESSED", "ZSTD", "ZSTD")
    assert RunReader(root).read("loss")["task_loss"].to_pylist() == FULL[1:301].tolist()


def test_no_rows_make_a_file_all_the_same(tmp_path: Path) -> None:
    schema = TABLES["loss"].arrow
    (tmp_path / "x").write_bytes(parquet_bytes(schema, []))
    assert pq.read_table(tmp_path / "x").num_rows == 0
