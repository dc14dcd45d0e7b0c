"""DuckDB views over a run: Parquet files are scanned where they lie, the journal's rows come through Arrow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from loopscope.store import LiveRange, RunReader

if TYPE_CHECKING:
    import duckdb

_DUCK = {
    "bool": "BOOLEAN",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "string": "VARCHAR",
    "timestamp[us, UTC]": "TIMESTAMP WITH TIME ZONE",
    "list<int64>": "BIGINT[]",
    "list<float32>": "FLOAT[]",
    "list<float64>": "DOUBLE[]",
}


class SqlViews:
    """The views of one connection: `<table>` (live rows) and `<table>_all`, made when they are first asked for.

    Making a view checks the table's files, so that a question about losses never reads the router's bytes.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, readers: Sequence[RunReader]) -> None:
        self.connection = connection
        self._readers = readers
        self._made: set[str] = set()
        connection.execute("set timezone = 'UTC'")
        # Programs that read our output would find the bar in it. In a notebook without ipywidgets it is off already,
        # and DuckDB refuses to be told so.
        if connection.sql("select current_setting('enable_progress_bar')").fetchall()[0][0]:
            connection.execute("set enable_progress_bar = false")

    def ensure(self, query: str | None = None) -> None:
        """Make the views of every table that the query names; of all tables where there is no query."""
        words = None if query is None else set(re.findall(r"\w+", query.lower()))
        for table in self._readers[0].schemas:
            for view, live in ((table, True), (f"{table}_all", False)):
                if view not in self._made and (words is None or view in words):
                    self._make(table, view, live)

    def _make(self, table: str, view: str, live: bool) -> None:
        self._made.add(view)
        if table == "attempt":
            self.connection.register(view, pa.concat_tables([r.read("attempt") for r in self._readers]))
            return
        selects = _selects(self.connection, self._readers, table, f"_journal_{view}", live)
        self.connection.execute(f"create view {quote(view)} as {' union all '.join(selects)}")


def _selects(
    connection: duckdb.DuckDBPyConnection, readers: Sequence[RunReader], table: str, journal: str, live: bool
) -> list[str]:
    """One select per shape of file and range of live steps, over all runs together, and one for the journals.

    A thousand runs must not become a thousand selects: planning them takes longer than reading.
    """
    schema = readers[0].schema(table)
    selects: list[str] = []
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    chunks: list[pa.Table] = []
    for reader in readers:
        for part in reader.parts(table, live=live):
            # A file holds one attempt, so that its rows need no look at the attempt column to be found live.
            where = _live_condition(reader.live[part.segment.attempt]) if live else ""
            groups.setdefault((where, reader.columns_of(part)), []).append(str(part.path))
        chunks += [
            reader.only_live(chunk, attempt) if live else chunk
            for attempt, chunk in reader.journal_rows(table, live=live)
        ]
    for (where, there), paths in groups.items():
        # A column that a file lacks is a typed null, which any later version may have added.
        columns = ", ".join(
            quote(c.name) if c.name in there else f"cast(null as {_DUCK[c.type]}) as {quote(c.name)}"
            for c in schema.columns
        )
        files = ", ".join(literal(p) for p in paths)
        selects.append(f"select {columns} from read_parquet([{files}], hive_partitioning = false){where}")
    if chunks or not selects:
        connection.register(journal, pa.concat_tables(chunks) if chunks else schema.arrow.empty_table())
        selects.append(f"select {', '.join(quote(c) for c in schema.names)} from {quote(journal)}")
    return selects


def _live_condition(live: LiveRange) -> str:
    terms = [f"step >= {live.start}"] if live.start > 0 else []
    if live.end is not None:
        terms.append(f"step < {live.end}")
    return f" where {' and '.join(terms)}" if terms else ""


def quote(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """An SQL string. DuckDB reads *, ? and [ in a path as patterns, so they are put in brackets."""
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in text)
    return "'" + escaped.replace("'", "''") + "'"
