"""Rows of a journal as Arrow tables: values by position become columns, a chunk at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from loopscope.store.schema import TableSchema

CHUNK_ROWS = 2048
"""Rows that are Python objects at a time, per table."""
_MISFIT = (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError)


class JournalColumns:
    """Collects rows by table; made to be handed to `decode_journal`.

    Args:
        tables: the registry.
        keys: the columns that every row shares and that rows leave out.
    """

    def __init__(self, tables: Mapping[str, TableSchema], keys: Mapping[str, Any]) -> None:
        self._tables = tables
        self._keys = keys
        self._pending: dict[str, tuple[tuple[str, ...], list[Sequence[Any]]]] = {}
        self._chunks: dict[str, list[pa.Table]] = {}
        self.unknown_tables: dict[str, int] = {}
        """Table that the registry does not know → rows."""
        self.unknown_columns: dict[str, set[str]] = {}
        """Table → columns with values that the registry does not know; complete once `tables` was called."""
        self.misfits: dict[str, int] = {}
        """Table → rows whose values do not fit the registry's types; the same."""

    def __call__(self, table: str, names: tuple[str, ...], values: Sequence[Any]) -> None:
        """Take one row: the names of its columns, and its values in their order."""
        pending = self._pending.get(table)
        if pending is None or pending[0] != names:
            if table not in self._tables:
                self.unknown_tables[table] = self.unknown_tables.get(table, 0) + 1
                return
            self._convert(table)
            pending = self._pending[table] = names, []
        pending[1].append(values)
        if len(pending[1]) >= CHUNK_ROWS:
            self._convert(table)

    def tables(self) -> dict[str, list[pa.Table]]:
        """Table → Arrow chunks of everything taken so far, in the registry's columns."""
        for table in list(self._pending):
            self._convert(table)
        return self._chunks

    def _convert(self, table: str) -> None:
        names, rows = self._pending.pop(table, ((), []))
        chunks = self._chunks.setdefault(table, [])
        try:
            chunks += self._chunk(table, names, rows)
        except _MISFIT:
            # One bad row must not take its neighbours along.
            for row in rows:
                try:
                    chunks += self._chunk(table, names, [row])
                except _MISFIT:
                    self.misfits[table] = self.misfits.get(table, 0) + 1

    def _chunk(self, table: str, names: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> list[pa.Table]:
        if not rows:
            return []
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        arrays = []
        for field in (schema := self._tables[table].arrow):
            values = columns.pop(field.name, None)
            if field.name in self._keys:
                arrays.append(pa.repeat(pa.scalar(self._keys[field.name], field.type), len(rows)))
            elif values is None:
                arrays.append(pa.nulls(len(rows), field.type))
            else:
                arrays.append(pa.array(values, type=field.type))
        for name, values in columns.items():
            if any(value is not None for value in values):
                self.unknown_columns.setdefault(table, set()).add(name)
        return [pa.Table.from_arrays(arrays, schema=schema)]
