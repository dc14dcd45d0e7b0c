"""DuckDB views over a run: Parquet files are scanned where they lie, the journal's rows come through Arrow."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
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
_FEW_RANGES = 8
"""More ranges of live steps than this are joined from a table; planning a select for each takes longer than reading."""
_LIVE = "_live"


class SqlViews:
    """The views of one database: `<table>` (live rows) and `<table>_all`, made when they are first asked for.

    Making a view checks the table's files, so that a question about losses never reads the router's bytes. Each thread
    has a connection of its own to the same views.
    """

    def __init__(self, root: duckdb.DuckDBPyConnection, readers: Sequence[RunReader]) -> None:
        self._root = root
        """Makes the views and the threads' connections, and answers nothing itself: a connection that is answering
        refuses every other call."""
        self._readers = readers
        self._made: set[str] = set()
        self._tables: dict[str, pa.Table] = {}
        """What the views take from Arrow; a connection knows those that were registered with it."""
        self._mutex = threading.RLock()
        self._of_thread = threading.local()

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """This thread's own, with everything that was registered so far."""
        with self._mutex:
            own = getattr(self._of_thread, "connection", None)
            if own is None:
                own = self._of_thread.connection = self._root.cursor()
                self._of_thread.known = set()
                own.execute("set timezone = 'UTC'")
                # Programs that read our output would find the bar in it. In a notebook without ipywidgets it is off
                # already, and DuckDB refuses to be told so.
                if own.sql("select current_setting('enable_progress_bar')").fetchall()[0][0]:
                    own.execute("set enable_progress_bar = false")
            for name in self._tables.keys() - self._of_thread.known:
                own.register(name, self._tables[name])
                self._of_thread.known.add(name)
            return own

    def register(self, name: str, table: pa.Table) -> None:
        """Make an Arrow table known under a name."""
        with self._mutex:
            self._tables[name] = table

    def ensure(self, query: str | None = None) -> None:
        """Make the views of every table that the query names; of all tables where there is no query."""
        words = None if query is None else set(re.findall(r"\w+", query.lower()))
        with self._mutex:
            for table in self._readers[0].schemas:
                for view, live in ((table, True), (f"{table}_all", False)):
                    if view not in self._made and (words is None or view in words):
                        self._make(table, view, live)
                        self._made.add(view)

    def _make(self, table: str, view: str, live: bool) -> None:
        if table == "attempt":
            self.register(view, pa.concat_tables([r.read("attempt") for r in self._readers]))
            return
        for reader in self._readers:
            seen = bool(reader.parts(table, live=live) or reader.journal_rows(table, live=live))
            reader.tell(table, has_rows=seen, stacklevel=4)
        selects = self._selects(table, f"_journal_{view}", live)
        self.connection.execute(f"create view {quote(view)} as {' union all '.join(selects)}")

    def _selects(self, table: str, journal: str, live: bool) -> list[str]:
        """One select per shape of file and range of live steps, over all runs together, and one for the journals.

        A thousand runs must not become a thousand selects, nor must a thousand attempts.
        """
        schema = self._readers[0].schema(table)
        shapes: dict[tuple[str, ...], dict[str, list[str]]] = {}
        chunks: list[pa.Table] = []
        for reader in self._readers:
            for part in reader.parts(table, live=live):
                if not _is_text(str(part.path)):
                    chunks += reader.part_rows(part, live=live)
                    continue
                # A file holds one attempt, so that its rows need no look at the attempt column to be found live.
                where = _live_condition(reader.live[part.segment.attempt]) if live else ""
                shapes.setdefault(reader.columns_of(part), {}).setdefault(where, []).append(str(part.path))
            chunks += [
                reader.only_live(chunk, attempt) if live else chunk
                for attempt, chunk in reader.journal_rows(table, live=live)
            ]
        selects: list[str] = []
        for there, ranges in shapes.items():
            # A column that a file lacks is a typed null, which any later version may have added.
            columns = ", ".join(
                f"part.{quote(c.name)}"
                if c.name in there
                else f"cast(null as {_DUCK[c.type]}) as {quote(c.name)}"
                for c in schema.columns
            )
            selects += [f"select {columns} from {source}" for source in self._sources(ranges)]
        if chunks or not selects:
            self.register(journal, pa.concat_tables(chunks) if chunks else schema.arrow.empty_table())
            selects.append(f"select {', '.join(quote(c) for c in schema.names)} from {quote(journal)}")
        return selects

    def _sources(self, ranges: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """What is selected from, for files of one shape: range of live steps → files."""
        whole = ranges.get("", [])
        cut = {where: paths for where, paths in ranges.items() if where}
        if whole:
            yield _files(whole)
        if len(cut) <= _FEW_RANGES:
            yield from (f"{_files(paths)}{where}" for where, paths in cut.items())
            return
        if _LIVE not in self._tables:
            self.register(_LIVE, _live_table(self._readers))
        files = _files([path for paths in cut.values() for path in paths])
        yield (
            f"{files} join {_LIVE} as live on part.run_id = live.run_id and part.attempt = live.attempt "
            "where part.step >= live.first_step and part.step < live.end_step"
        )


def _files(paths: Sequence[str]) -> str:
    listed = ", ".join(literal(path) for path in paths)
    return f"read_parquet([{listed}], hive_partitioning = false) as part"


def _live_table(readers: Sequence[RunReader]) -> pa.Table:
    rows = [
        {
            "run_id": reader.manifest.run_id,
            "attempt": attempt,
            "first_step": live.start,
            "end_step": (1 << 62) if live.end is None else live.end,
        }
        for reader in readers
        for attempt, live in reader.live.items()
    ]
    fields = [
        ("run_id", pa.string()),
        ("attempt", pa.int32()),
        ("first_step", pa.int64()),
        ("end_step", pa.int64()),
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


def _live_condition(live: LiveRange) -> str:
    terms = [f"step >= {live.start}"] if live.start > 0 else []
    if live.end is not None:
        terms.append(f"step < {live.end}")
    return f" where {' and '.join(terms)}" if terms else ""


def _is_text(path: str) -> bool:
    """False for a name that is no UTF-8, which no engine takes as a path."""
    return all(not 0xD800 <= ord(letter) <= 0xDFFF for letter in path)


def quote(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """An SQL string. DuckDB reads *, ? and [ in a path as patterns, so they are put in brackets."""
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in text)
    return "'" + escaped.replace("'", "''") + "'"
