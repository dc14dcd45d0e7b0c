"""Import paths that code outside this repository uses. One that has to go is first announced in the changelog."""

from __future__ import annotations

from importlib import import_module

import pytest

KEPT = {
    "loopscope.store": ("RunStore", "StoreOptions", "TABLES"),
    "loopscope.store.checksum": ("with_checksum",),
    "loopscope.store.ids": ("uuid7", "this_process"),
    "loopscope.store.locks": ("GRACE_S", "read_holder"),
    "loopscope.store.reader": ("RunReader", "read_table"),
    "loopscope.store.schema": ("TableSchema",),
    "loopscope.store.tables": ("TABLES",),
}
"""Module → what is taken from it."""


@pytest.mark.parametrize(("module", "names"), KEPT.items(), ids=KEPT)
def test_a_kept_path_imports(module: str, names: tuple[str, ...]) -> None:
    found = import_module(module)
    assert [name for name in names if not hasattr(found, name)] == []
