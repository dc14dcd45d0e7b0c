"""The routes."""

import secrets
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from loopscope import __version__
from loopscope.alerts import Bounds
from loopscope.analysis import open_run
from loopscope.errors import ConfigError, LoopscopeError
from loopscope.report.page import MOST_RUNS, asset, script_bundle
from loopscope.report.run_page import shown_name
from loopscope.service.access import Guard
from loopscope.service.catalog import Catalog, CatalogEntry
from loopscope.service.openapi import openapi
from loopscope.service.prometheus import MOST_RUNS as MOST_GAUGED
from loopscope.service.prometheus import exposition
from loopscope.service.responses import Json, encoded
from loopscope.service.rows import number, rows
from loopscope.service.views import CachedViews, steady

_PER_PAGE = 50
_SCRAPE_S = 5.0
"""A scrape that takes longer would be given up by whoever asked."""


def make_app(root: Path, *, token: str | None = None, settings: Bounds = None) -> Starlette:
    """The service over the runs below `root`, as an ASGI application.

    Args:
        root: folder of the runs.
        token: whoever knows it may ask; without one this machine alone.
        settings: bounds to judge by, instead of those that the runs were trained with.

    Raises:
        ConfigError: `root` is no folder.
    """
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder, expected one that holds runs. Name it.")
    service = _Service(Catalog(root), CachedViews(settings))
    routes = [
        Route("/", service.index),
        Route("/runs/{key}", service.page),
        Route("/compare", service.compare),
        Route("/static/vega.js", service.vega),
        Route("/metrics", service.metrics),
        Route("/api/openapi.json", service.describe),
        Route("/api/runs", service.list_runs),
        Route("/api/compare/version", service.compared_version),
        Route("/api/runs/{key}", service.run),
        Route("/api/runs/{key}/version", service.version),
        Route("/api/runs/{key}/charts", service.charts),
        Route("/api/runs/{key}/tables/{table}", service.table),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={LoopscopeError: _refused, HTTPException: _refused},
    )


class _Service:
    def __init__(self, catalog: Catalog, views: CachedViews) -> None:
        self._catalog, self._views = catalog, views

    async def _asked(self, request: Request) -> CatalogEntry:
        return await self._entry(request.path_params["key"])

    async def _entry(self, key: str) -> CatalogEntry:
        entry = await run_in_threadpool(self._catalog.find, key)
        if entry is None:
            raise HTTPException(404, "there is no such run; see /api/runs")
        return entry

    async def index(self, request: Request) -> Response:
        entries = await run_in_threadpool(self._catalog.entries)
        pages = max(1, -(-len(entries) // _PER_PAGE))
        page = min(pages, number(request.query_params, "page", 1, 1, pages))
        shown = entries[(page - 1) * _PER_PAGE : page * _PER_PAGE]
        states = await run_in_threadpool(lambda: [(entry, entry.state()) for entry in shown])
        nonce = secrets.token_urlsafe(16)
        templates = jinja2.Environment(
            loader=jinja2.PackageLoader("loopscope.service", "assets"),
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        )  # fmt: skip
        text = templates.get_template("index.html.j2").render(
            shown_name=shown_name,
            entries=states, total=len(entries), truncated=self._catalog.truncated, page=page, pages=pages, nonce=nonce,
            newest=f"{entries[0].key if entries else ''} {len(entries)}",
            style=Markup(asset("report.css")),
            script=Markup((Path(__file__).parent / "assets" / "index.js").read_text(encoding="utf-8")),
        )  # fmt: skip
        return _html(text, nonce)

    async def page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        return _html(await self._views.page(await self._asked(request), nonce), nonce)

    async def compare(self, request: Request) -> Response:
        by = request.query_params.get("by", "step")
        if by not in ("step", "tokens"):
            raise ConfigError(f"by is {by[:20]!r}, expected step or tokens")
        entries = await self._several(request)
        nonce = secrets.token_urlsafe(16)
        return _html(await self._views.comparison(entries, by, nonce), nonce)  # type: ignore[arg-type]

    async def compared_version(self, request: Request) -> Response:
        found = [await self._views.version(entry) for entry in await self._several(request)]
        if any(version == "gone" for version, _ in found):
            raise HTTPException(404, "one of the runs is no longer there")
        state = "running" if any(state == "running" for _, state in found) else "finished"
        return Json({"version": "".join(version for version, _ in found), "state": state})

    async def _several(self, request: Request) -> list[CatalogEntry]:
        keys = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(keys) <= MOST_RUNS:
            raise ConfigError(f"got {len(keys)} runs, expected 2 to {MOST_RUNS}. Tick them in the list.")
        return [await self._entry(key) for key in keys]

    async def vega(self, request: Request) -> Response:
        return Response(
            await run_in_threadpool(script_bundle),
            media_type="text/javascript",
            headers={"cache-control": "private, max-age=86400"},
        )

    async def metrics(self, request: Request) -> Response:
        entries = await run_in_threadpool(self._catalog.entries)
        readable = [entry for entry in entries if not entry.problem]
        states = await run_in_threadpool(lambda: {entry.key: entry.state() for entry in readable})
        # Live ones first; the sort keeps the newest first among equals.
        chosen = sorted(readable, key=lambda entry: states[entry.key] != "running")[:MOST_GAUGED]
        known, until = [], time.monotonic() + _SCRAPE_S
        for entry in chosen:
            if time.monotonic() > until:
                break  # What was read is kept: the next scrape has the rest.
            with suppress(LoopscopeError):  # Deleted while we looked, or damaged: it has no gauges.
                known.append((entry, states[entry.key], await self._views.headline(entry)))
        return PlainTextResponse(
            encoded(exposition(known, len(entries))), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def describe(self, request: Request) -> Response:
        return Json(openapi(__version__))

    async def list_runs(self, request: Request) -> Response:
        limit = number(request.query_params, "limit", 100, 1, 1000)
        entries = await run_in_threadpool(self._catalog.entries)
        found = await run_in_threadpool(lambda: [_described(entry) for entry in entries[:limit]])
        return Json({"runs": found, "total": len(entries), "truncated": len(entries) > len(found)})

    async def run(self, request: Request) -> Response:
        entry = await self._asked(request)
        about = await run_in_threadpool(_described, entry)
        return Json(about | {"headline": await self._views.headline(entry)})

    async def version(self, request: Request) -> Response:
        version, state = await self._views.version(await self._asked(request))
        if version == "gone":
            raise HTTPException(404, "the run is no longer there")
        return Json({"version": version, "state": state})

    async def charts(self, request: Request) -> Response:
        return Response(await self._views.charts(await self._asked(request)), media_type="application/json")

    async def table(self, request: Request) -> Response:
        entry, table = await self._asked(request), request.path_params["table"]
        read = partial(
            steady, [entry], lambda: rows(open_run(entry.path, partial=True), table, request.query_params)
        )
        return Json(await run_in_threadpool(read))


def _described(entry: CatalogEntry) -> dict[str, Any]:
    created = None if entry.created is None else entry.created.isoformat()
    return {
        "key": entry.key, "name": entry.name, "run_id": entry.run_id, "place": entry.place, "created": created,
        "state": "unreadable" if entry.problem else entry.state(), "problem": entry.problem,
    }  # fmt: skip


def _html(text: str, nonce: str) -> Response:
    # Vega compiles its expressions, which needs unsafe-eval; scripts run by the nonce or from this server alone.
    policy = (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(encoded(text), headers={"content-security-policy": policy})


async def _refused(request: Request, error: Exception) -> Response:
    status, text = 422 if isinstance(error, ConfigError) else 404, str(error)
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    if request.url.path.startswith("/api/"):
        return Json({"error": text}, status)
    return PlainTextResponse(encoded(text + "\n"), status)
