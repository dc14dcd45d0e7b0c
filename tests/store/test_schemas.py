from __future__ import annotations

from pathlib import Path

import pytest

from loopscope.errors import SchemaError
from loopscope.store import TABLES, Column, TableSchema
from loopscope.store.documents import schema_differences, write_schemas
from loopscope.store.tables.keys import RUN_KEYS
from loopscope.store.types import TYPES

SCHEMAS = Path(__file__).parents[2] / "schemas"


def test_the_published_schemas_are_the_registry() -> None:
    assert schema_differences(SCHEMAS) == []


def test_every_table_but_attempt_starts_with_the_run_keys() -> None:
    for name, schema in TABLES.items():
        if name != "attempt":
            assert schema.columns[: len(RUN_KEYS)] == RUN_KEYS


def test_changing_a_column_under_the_same_version_is_found(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    loss = TABLES["loss"]
    changed = tuple(Column("lr", "float64", "another meaning") if c.name == "lr" else c for c in loss.columns)
    tables = {**TABLES, "loss": TableSchema("loss", loss.doc, changed, loss.primary_key)}
    assert schema_differences(tmp_path, tables) == [
        "loss.v1.json differs from the registry: a published version never changes; add a version with the new column"
    ]


def test_a_new_version_with_a_column_leaves_the_old_documents_alone(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    loss = TABLES["loss"]
    grown = TableSchema(
        "loss",
        loss.doc,
        (*loss.columns, Column("extra", "float64", "new", since=2)),
        loss.primary_key,
        version=2,
    )
    tables = {**TABLES, "loss": grown}
    assert [p.name for p in write_schemas(tmp_path, tables)] == ["loss.v2.json"]
    assert schema_differences(tmp_path, tables) == []
    assert grown.at(1).describe() == loss.describe()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Column("x", "float16", ""),
        lambda: TableSchema("t", "", (Column("x", "int32", ""), Column("x", "int32", "")), ()),
        lambda: TableSchema("t", "", (Column("x", "int32", ""),), ("y",)),
        lambda: TableSchema("t", "", (Column("x", "int32", "", since=2),), ()),
        lambda: TABLES["loss"].at(2),
    ],
)
def test_a_wrong_schema_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SchemaError):
        make()


def test_types_are_the_plain_ones() -> None:
    assert set(TYPES) == {
        "bool", "int32", "int64", "float32", "float64", "string", "timestamp[us, UTC]",
        "list<int64>", "list<float32>", "list<float64>",
    }  # fmt: skip


def test_metrics_and_store_name_the_same_columns_with_the_same_types() -> None:
    metrics = pytest.importorskip("loopscope.metrics", reason="the metrics need torch")
    by_table: dict[str, dict[str, str]] = {}
    for (table, name), metric in metrics.REGISTRY.items():
        by_table.setdefault(table, {})[name] = metric.kind
    keys = {
        "run_id", "attempt", "step", "rank", "world_size", "aggregation_scope", "tokens_seen", "elapsed_s",
        "wall_time", "null_reasons", "block", "unrolled_pos", "loop_step", "layer_idx", "num_loop_steps",
        "num_experts", "top_k", "score_func", "score_space", "num_tokens", "num_microbatches", "kind", "from_pos",
        "to_pos", "from_loop_step", "to_loop_step", "from_layer_idx", "to_layer_idx",
    }  # fmt: skip
    for table, columns in by_table.items():
        stored = {c.name: c.type for c in TABLES[table].columns if c.name not in keys}
        assert columns == stored, table
