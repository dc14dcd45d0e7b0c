from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loopscope.catalog.table import Column
from loopscope.catalog.tables.keys import RUN_KEYS
from loopscope.errors import SchemaError
from loopscope.store import TABLES, TableSchema
from loopscope.store.documents import check_published, schema_documents
from loopscope.store.schema import TYPES

LOSS = TABLES["loss"]
LATER = Column(name="later", formula="new", since=LOSS.version + 1)
GROWN = replace(LOSS, columns=(*LOSS.columns, LATER), version=LOSS.version + 1)
NAME = f"loss.v{LOSS.version}.json"


def test_every_table_but_attempt_starts_with_the_run_keys() -> None:
    for name, schema in TABLES.items():
        if name != "attempt":
            assert schema.columns[: len(RUN_KEYS)] == RUN_KEYS


def test_the_columns_of_a_published_version_never_change() -> None:
    published = schema_documents()[NAME]
    reworded = tuple(replace(c, formula="in other words") if c.name == "lr" else c for c in LOSS.columns)
    check_published(NAME, published, json.dumps(replace(LOSS, columns=reworded).describe()))
    for columns in (
        tuple(replace(c, type="int64") if c.name == "lr" else c for c in LOSS.columns),
        (*LOSS.columns, replace(LATER, since=1)),
        LOSS.columns[:-1],
    ):
        with pytest.raises(SchemaError, match=NAME):
            check_published(NAME, published, json.dumps(replace(LOSS, columns=columns).describe()))


def test_a_new_version_with_a_column_leaves_the_old_document_alone() -> None:
    documents = schema_documents({"loss": GROWN})
    assert set(documents) == {NAME, f"loss.v{GROWN.version}.json"}
    assert documents[NAME] == schema_documents()[NAME]
    assert GROWN.at(LOSS.version).describe() == LOSS.describe()


def _table(*columns: Column, key: tuple[str, ...] = ()) -> TableSchema:
    return TableSchema(name="t", doc="", columns=columns, primary_key=key)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Column(name="x", type="float16", formula=""),
        lambda: _table(Column(name="x", formula=""), Column(name="x", formula="")),
        lambda: _table(Column(name="x", formula=""), key=("y",)),
        lambda: _table(Column(name="x", formula="", since=2)),
        lambda: LOSS.at(LOSS.version + 1),
        lambda: LOSS.at(LOSS.oldest - 1),
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
