"""A run, opened for reading."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from loopscope.analysis.frames import DtypeBackend, to_pandas
from loopscope.analysis.sql_views import SqlViews
from loopscope.catalog.registry import TABLES
from loopscope.errors import StoreError
from loopscope.store import Attempt, LiveRange, Manifest, Problem, Remote, RunReader

if TYPE_CHECKING:
    import duckdb
    import polars as pl
    import pyarrow as pa


class Run:
    """What a run held when it was opened; `refresh` looks again. Reading never holds up whoever writes.

    Rows that a rollback superseded are left out unless `live=False` asks for them. Threads may share a run; one that is
    sent to another process is opened there anew.
    """

    def __init__(self, path: str | Path, *, partial: bool = False) -> None:
        self._partial = partial
        self._origin: tuple[Any, object] = (Path(path).absolute(), None)
        """What `open_run` was given, and the filesystem of it."""
        self.reader = RunReader(path, tells=not partial)
        """The look at the files behind everything else."""

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process, or a copy: opened anew, since connections and open files do not travel.
        return (_opened_again, (*self._origin, self._partial))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, run_id={self.run_id!r}, tables={self.tables})"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.reader.root

    @property
    def run_id(self) -> str:
        """UUIDv7 of the run."""
        return self.manifest.run_id

    @property
    def manifest(self) -> Manifest:
        """What run.json says; `rebuilt` is True where it had to be put together from the rows."""
        return self.reader.manifest

    @property
    def tables(self) -> list[str]:
        """Tables that have rows."""
        return self.reader.tables

    @property
    def attempts(self) -> list[Attempt]:
        """Every attempt, live or not."""
        return self.reader.attempts

    @property
    def live(self) -> dict[int, LiveRange]:
        """Attempt → steps at which its rows are live."""
        return self.reader.live

    @property
    def problems(self) -> list[Problem]:
        """Everything that is wrong with the run. Looks at every file, once."""
        return self.reader.check_all()

    def arrow(self, table: str, *, live: bool = True, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of one table; columns that were never written are null.

        Raises:
            SchemaError: the table or a column does not exist.
        """
        return self.reader.read(table, live=live, columns=columns)

    def polars(self, table: str, *, live: bool = True, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Rows of one table as a Polars frame; needs polars."""
        frame: pl.DataFrame = _installed("polars").from_arrow(self.arrow(table, live=live, columns=columns))
        return frame

    def pandas(
        self,
        table: str,
        *,
        live: bool = True,
        columns: Sequence[str] | None = None,
        dtype_backend: DtypeBackend | None = None,
    ) -> Any:
        """Rows of one table as a pandas frame; needs pandas.

        Args:
            table: name of the table.
            live: False also gives the rows that a rollback superseded.
            columns: names; None for all.
            dtype_backend: "numpy_nullable" or "pyarrow", as in `pandas.read_parquet`. None gives NumPy's types, and
                pandas' nullable ones (``Int64``, ``boolean``) for integers and truth values that may be missing.

        Raises:
            SchemaError: the table or a column does not exist.
            ConfigError: another `dtype_backend`.
        """
        _installed("pandas")
        rows = self.arrow(table, live=live, columns=columns)
        whole = [c.name for c in TABLES[table].columns if c.required and c.type.startswith("int")]
        return to_pandas(rows, dtype_backend, whole=whole)

    def sql(self, query: str, parameters: Sequence[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """A DuckDB query over views named as the tables are (live rows) and `<table>_all` (every row).

        >>> open_run("RUN").sql("select step, task_loss from loss order by step").arrow()  # doctest: +SKIP
        """
        self._views.ensure(query)
        return self._views.connection.sql(query, params=parameters)

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """This thread's DuckDB connection behind `sql`, with the views of all tables; in memory, this object's own."""
        self._views.ensure()
        return self._views.connection

    @cached_property
    def _views(self) -> SqlViews:
        import duckdb

        return SqlViews(duckdb.connect(":memory:"), [self.reader])

    def refresh(self) -> Run:
        """The run as it is now."""
        return Run(self.path, partial=self._partial)


def _opened_again(path: Any, filesystem: object, partial: bool) -> Run:
    return open_run(path, filesystem=filesystem, partial=partial)


def _installed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise StoreError(f"{package} is not installed; `pip install {package}`, or use .arrow()") from None


def open_run(path: str | Path, *, filesystem: object = None, partial: bool = False) -> Run:
    """Open a run directory for reading: while it is written, after a crash, after rollbacks.

    Args:
        path: the run directory; or a URI such as ``s3://bucket/runs/one``, whose files are copied to a temporary
            folder first, which goes away with the returned object.
        filesystem: a pyarrow or fsspec filesystem that `path` is a path on.
        partial: give what can be read of a table without a word; `problems` has what cannot. Without it a table of
            which some files cannot be read comes with a `LeftOutWarning`, and where none can, that is an
            `UnreadableError`.

    Raises:
        NotARunError: the folder holds no run.
        SchemaError: it holds a run of a layout that this version reads no more.
        ConfigError: there is no filesystem for the URI.
    """
    if filesystem is None and "://" not in str(path):
        return Run(path, partial=partial)
    folder = Path(mkdtemp(prefix="loopscope-"))
    try:
        Remote.of(str(path), filesystem).fetch(folder)
        run = Run(folder, partial=partial)
        run._origin = (path, filesystem)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)
    return run
