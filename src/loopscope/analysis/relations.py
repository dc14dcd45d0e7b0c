"""DuckDB views over a run: Parquet files are scanned where they lie, the journal's rows come through Arrow."""

from __future__ import annotations

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


def register_views(connection: duckdb.DuckDBPyConnection, readers: Sequence[RunReader]) -> None:
    """Make the views `<table>` (live rows) and `<table>_all` for every table of the registry."""
    connection.execute("set timezone = 'UTC'")
    for table in readers[0].schemas:
        if table == "attempt":
            connection.register("attempt", pa.concat_tables([r.read("attempt") for r in readers]))
            connection.execute("create view attempt_all as select * from attempt")
            continue
        for live, view in ((True, table), (False, f"{table}_all")):
            selects = [
                _select(connection, reader, table, f"{view}_{index}", live)
                for index, reader in enumerate(readers)
            ]
            connection.execute(f"create view {quote(view)} as {' union all '.join(selects)}")


def _select(
    connection: duckdb.DuckDBPyConnection, reader: RunReader, table: str, view: str, live: bool
) -> str:
    """One select over everything the table has."""
    schema = reader.schema(table)
    sources: list[str] = []
    parts = reader.parts(table, live=live)
    by_columns: dict[tuple[str, ...], list[str]] = {}
    for part in parts:
        # Files of one shape share a scan; a column that a file lacks is a typed null, which any version can add.
        by_columns.setdefault(reader.columns_of(part), []).append(str(part.path))
    for there, paths in by_columns.items():
        columns = ", ".join(
            quote(c.name) if c.name in there else f"cast(null as {_DUCK[c.type]}) as {quote(c.name)}"
            for c in schema.columns
        )
        files = ", ".join(literal(p) for p in paths)
        sources.append(f"select {columns} from read_parquet([{files}], hive_partitioning = false)")
    chunks = [chunk for _, chunk in reader.journal_rows(table, live=live)]
    if chunks or not sources:
        name = f"_journal_{view}"
        connection.register(name, pa.concat_tables(chunks) if chunks else schema.arrow.empty_table())
        sources.append(f"select {', '.join(quote(c) for c in schema.names)} from {quote(name)}")
    union = " union all ".join(sources)
    if not live:
        return union
    return f"select * from ({union}) where {live_condition(reader.live)}"


def live_condition(live: dict[int, LiveRange]) -> str:
    """The live-row rule as SQL."""
    terms: Sequence[str] = [
        f"(attempt = {number} and step >= {r.start}" + ("" if r.end is None else f" and step < {r.end}") + ")"
        for number, r in sorted(live.items())
    ]
    return f"({' or '.join(terms)})" if terms else "false"


def quote(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """An SQL string. DuckDB reads *, ? and [ in a path as patterns, so they are put in brackets."""
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in text)
    return "'" + escaped.replace("'", "''") + "'"
