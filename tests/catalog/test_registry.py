"""Every declaration says what it must, and needs nothing but NumPy."""

from __future__ import annotations

import re

import pytest

from loopscope.catalog.docs import metrics_page
from loopscope.catalog.registry import METRICS, TABLES

_WEIGHT = r"[a-z_]+( less [a-z_]+)?"
_MERGES = re.compile(
    rf"sum|max|min|mean|constant|last|union|mean by {_WEIGHT}|root mean square by {_WEIGHT}|from .+"
    "|not; one number over one corpus"
)


@pytest.mark.parametrize("key", METRICS, ids=".".join)
def test_every_metric_says_everything(key):
    column = METRICS[key]
    for text in (column.formula, column.unit, column.merge, column.source, column.null_rule):
        assert text.strip()
    assert _MERGES.fullmatch(column.merge), column.merge


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_columns_that_a_declaration_names_exist(table):
    for column in table.columns:
        if column.one_batch:
            assert column.one_batch in table.names
        if by := re.fullmatch(rf".*mean.* by ({_WEIGHT})", column.merge):
            assert set(by[1].split(" less ")) <= set(table.names)


@pytest.mark.parametrize("table", sorted({table for table, _ in METRICS}))
def test_the_page_names_every_metric_once_per_table(table):
    section = metrics_page().split(f"\n## `{table}`\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert named == [name for owner, name in METRICS if owner == table]


def test_pictures_have_names_of_their_own():
    ids = [c.picture.id for c in METRICS.values() if c.picture is not None]
    assert len(set(ids)) == len(ids)
