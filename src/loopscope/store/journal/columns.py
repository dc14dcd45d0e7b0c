"""Rows of a journal as Arrow tables, a chunk at a time so that Python objects never pile up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from loopscope.store.parts.parquet import rows_to_arrow
from loopscope.store.schema import TableSchema

CHUNK_ROWS = 2048


class ArrowRows:
    """Collects rows by table; made to be handed to `decode_journal`."""

    def __init__(
        self, tables: Mapping[str, TableSchema], keys: dict[str, Any], only: set[str] | None = None
    ) -> None:
        self._tables = tables
        self._keys = keys
        self._only = only
        self._pending: dict[str, list[dict[str, Any]]] = {}
        self._chunks: dict[str, list[pa.Table]] = {}
        self.unknown_tables: dict[str, int] = {}
        """Table that the registry does not know → rows."""
        self.unknown_columns: dict[str, set[str]] = {}
        """Table → columns that the registry does not know; complete once `tables` was called."""
        self.misfits: dict[str, int] = {}
        """Table → rows whose values do not fit the registry's types; the same."""

    def __call__(self, table: str, row: dict[str, Any]) -> None:
        """Take one row."""
        schema = self._tables.get(table)
        if schema is None:
            self.unknown_tables[table] = self.unknown_tables.get(table, 0) + 1
            return
        if self._only is not None and table not in self._only:
            return
        pending = self._pending.setdefault(table, [])
        pending.append(row)
        if len(pending) >= CHUNK_ROWS:
            self._convert(table)

    def tables(self) -> dict[str, list[pa.Table]]:
        """Table → Arrow chunks of everything taken so far."""
        for table in list(self._pending):
            self._convert(table)
        return self._chunks

    def _convert(self, table: str) -> None:
        rows = self._pending.pop(table)
        schema = self._tables[table]
        if extra := set().union(*rows) - schema.name_set:
            self.unknown_columns.setdefault(table, set()).update(extra)
        try:
            chunks = [rows_to_arrow(schema, rows, self._keys)]
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError):
            chunks = []
            for row in rows:
                # One bad row must not take its neighbours along.
                try:
                    chunks.append(rows_to_arrow(schema, [row], self._keys))
                except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError):
                    self.misfits[table] = self.misfits.get(table, 0) + 1
        self._chunks.setdefault(table, []).extend(chunks)
