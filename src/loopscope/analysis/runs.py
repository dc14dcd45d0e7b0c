"""Several runs at once."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from loopscope.analysis.run import Run
from loopscope.analysis.sql_views import SqlViews
from loopscope.errors import NotARunError, StoreError

if TYPE_CHECKING:
    import duckdb


class Runs(Sequence[Run]):
    """Runs in order of their creation, a branch behind the run that it left; a copied run counts once."""

    def __init__(self, runs: Sequence[Run], skipped: Sequence[str] = ()) -> None:
        self._runs = list(runs)
        self.skipped = list(skipped)
        """Folders that matched and are no run, or copies of one that is here already; with the reason."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Runs, (self._runs, self.skipped))

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def arrow(self, table: str, *, live: bool = True, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of one table over all runs; `run_id` tells them apart."""
        return pa.concat_tables([run.arrow(table, live=live, columns=columns) for run in self._runs])

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """A DuckDB query over views named as the tables are, and over `run`: a row per run.

        `run` has run_id, run_name, path, created, and configuration as JSON text: ``configuration ->> '$.trainer.lr'``.
        """
        self._views.ensure(query)
        return self._views.connection.sql(query)

    @cached_property
    def _views(self) -> SqlViews:
        import duckdb

        views = SqlViews(duckdb.connect(":memory:"), [run.reader for run in self._runs])
        about = [
            {
                "run_id": run.run_id,
                "run_name": run.manifest.run_name,
                "path": str(run.path),
                "created": run.manifest.created,
                "configuration": msgspec.json.encode(run.manifest.configuration).decode(),
            }
            for run in self._runs
        ]
        views.register("run", pa.Table.from_pylist(about))
        return views


def open_runs(pattern: str | Path) -> Runs:
    """Every run whose folder matches a glob pattern.

    Raises:
        NotARunError: no run matches.
    """
    found: dict[str, Run] = {}
    skipped: list[str] = []
    # Path.glob takes no absolute pattern.
    for path in sorted(glob.glob(str(pattern), recursive=True)):  # noqa: PTH207
        try:
            run = Run(path)
        except StoreError as error:
            skipped.append(str(error))
        else:
            first = found.setdefault(run.run_id, run)
            if first is not run:
                skipped.append(f"{path} is a copy of {first.path} (run {run.run_id})")
    if not found:
        raise NotARunError(
            f"no run matches {str(pattern)!r}. Give a pattern such as 'runs/*'. {' '.join(skipped)}"
        )
    return Runs(_in_order(found), skipped)


def _in_order(runs: Mapping[str, Run]) -> list[Run]:
    """By creation, as run ids are; but a branch never before the run that it left, whatever clock made its id."""
    ordered: dict[str, Run] = {}

    def add(run_id: str | None, above: frozenset[str] = frozenset()) -> None:
        if run_id is not None and run_id in runs and run_id not in ordered and run_id not in above:
            add(runs[run_id].manifest.parent_run_id, above | {run_id})
            ordered[run_id] = runs[run_id]

    for run_id in sorted(runs):
        add(run_id)
    return list(ordered.values())
