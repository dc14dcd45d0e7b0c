"""What is read of a run, once per change of its files, however many ask."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

import duckdb

from loopscope.alerts import Bounds
from loopscope.analysis import Run, open_run
from loopscope.analysis.gauges import last_values
from loopscope.analysis.health_findings import findings
from loopscope.analysis.records import records
from loopscope.analysis.scope import scope_of
from loopscope.catalog.registry import GAUGES
from loopscope.errors import StoreError
from loopscope.report.compare import Axis, comparison
from loopscope.report.page import render
from loopscope.report.run_page import chart_json, read_run_page, shown_name
from loopscope.service.cache import ResultCache
from loopscope.service.catalog import CatalogEntry
from loopscope.service.responses import Json

T = TypeVar("T")
_SMALL = 4096


class CachedViews:
    """Results by run and by the version of its files, made once for all who ask; the least recently asked ones go."""

    def __init__(self, bounds: Bounds = None) -> None:
        self._bounds = bounds
        # Stands where each answer's own nonce goes; nobody can guess it, so that no name of a run can hold it.
        self._nonce = secrets.token_hex(16)
        self.cache = ResultCache(most=512, most_bytes=128 << 20)
        """What is kept, and how large it is."""

    async def page(self, entry: CatalogEntry, nonce: str) -> str:
        """The run's page, for scripts that have `nonce`."""
        return (await self._shown(entry))[0].replace(self._nonce, nonce)

    async def charts(self, entry: CatalogEntry) -> bytes:
        """The run's charts and their data, as JSON."""
        return (await self._shown(entry))[1]

    async def comparison(self, entries: Sequence[CatalogEntry], by: Axis, nonce: str) -> str:
        """The page that compares runs."""
        keys = [entry.key for entry in entries]

        def make() -> str:
            live = "/api/compare/version?" + urlencode([("run", key) for key in keys])
            part = comparison(
                [open_run(e.path, partial=True) for e in entries], [shown_name(e.name) for e in entries], by
            )
            return render([], part, "", live=live, nonce=self._nonce)

        page = await self.cache.get(
            ("comparison", by, *keys),
            lambda: "".join(entry.version() for entry in entries),
            lambda: steady(entries, make),
            len,
        )
        return page.replace(self._nonce, nonce)

    async def headline(self, entry: CatalogEntry) -> dict[str, Any]:
        """The run's last values and alerts, in a few small queries."""
        return await self.cache.get(
            ("headline", entry.key),
            entry.version,
            lambda: steady([entry], lambda: headline(open_run(entry.path, partial=True), self._bounds)),
            lambda _: _SMALL,
        )

    async def version(self, entry: CatalogEntry) -> tuple[str, str]:
        """A text that changes whenever the run's files do, and its state; looked at once for all who ask at a time."""
        # A version that never comes twice: nothing that was made before is taken.
        return await self.cache.get(
            ("version", entry.key),
            lambda: secrets.token_hex(8),
            lambda: (entry.version(), entry.state()),
            lambda _: _SMALL,
        )

    async def _shown(self, entry: CatalogEntry) -> tuple[str, bytes]:
        """Page and charts. The text is kept, not the part: its rows as Python objects take twenty times the memory."""

        def make() -> tuple[str, bytes]:
            part = read_run_page(open_run(entry.path, partial=True), "r0", self._bounds)
            page = render([part], None, "", live=f"/api/runs/{entry.key}/version", nonce=self._nonce)
            return page, bytes(Json(chart_json(part)).body)

        return await self.cache.get(
            ("page", entry.key),
            entry.version,
            lambda: steady([entry], make),
            lambda made: sum(map(len, made)),
        )


def steady(entries: Sequence[CatalogEntry], read: Callable[[], T]) -> T:
    """What `read` gives; tried again where files went away under it.

    Raises:
        StoreError: a run was deleted.
    """
    for left in (2, 1, 0):
        try:
            found = read()
        except (duckdb.Error, OSError):
            if any(entry.is_gone() for entry in entries):
                raise StoreError("the run is no longer there") from None
            if not left:
                raise
        else:
            # Half of a run that is being deleted can be read as well: as one that has hardly begun.
            if any(entry.is_gone() for entry in entries):
                raise StoreError("the run is no longer there")
            return found
        time.sleep(0.05)  # Whoever deletes or seals is half-way.
    raise AssertionError


def headline(run: Run, bounds: Bounds = None) -> dict[str, Any]:
    """Plain values for the list, the API and the gauges; what is null, or not known, is None.

    `scope` says in words whose rows the losses are, `skipped` of each gauge how many null rows it left out.
    """
    found: dict[str, Any] = {"step": None, "tokens_seen": None, "wall_time": None}
    if "loss" in run.tables:
        scope = scope_of(run, "loss")
        newest = f"from loss where {scope.where} order by step desc limit 1"
        found |= next(records(run, f"select {', '.join(found)} {newest}"), {})
        found["scope"] = scope.words
    if found["wall_time"] is not None:
        found["wall_time"] = found["wall_time"].isoformat()
    last = last_values(run)
    result = findings(run, bounds)
    return {
        **found,
        **{GAUGES[key].name: at.value for key, at in last.items()},
        "skipped": {GAUGES[key].name: at.skipped for key, at in last.items() if at.skipped},
        "health": result.state,
        "findings": [
            {"rule": f.rule, "severity": f.severity, "over": f.over, "title": f.title, "text": f.text}
            for f in result.found
        ],
    }
