"""The API's description, by hand: a test holds it against the routes."""

from typing import Any

from loopscope.report.page import MOST_RUNS
from loopscope.service.rows import MOST_COLUMNS, MOST_ROWS

_KEY: dict[str, Any] = {
    "name": "key", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
    "description": "key of a run, from /api/runs",
}  # fmt: skip

# An array in a query is its name once for each, unless said otherwise.
_RUNS = {
    "name": "run", "in": "query", "required": True,
    "schema": {"type": "array", "items": _KEY["schema"], "minItems": 2, "maxItems": MOST_RUNS},
    "description": "keys of the runs, once for each",
}  # fmt: skip


def _get(summary: str, *parameters: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    answers = {
        "200": {"description": "as asked", "content": {kind: {"schema": {}}}},
        "404": {"description": "there is no such run"},
        "422": {"description": "the question was wrong; `error` says how"},
    }
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": answers}}


def _query(name: str, kind: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": kind}, "description": description}


def openapi(version: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "loopscope", "version": version, "description": "Reads runs; changes nothing."},
        "paths": {
            "/api/openapi.json": _get("This description"),
            "/api/runs": _get(
                "The runs, the newest first", _query("limit", "integer", "1000 at most; 100 by default")
            ),
            "/api/compare/version": _get(
                "A text that changes whenever a file of one of 2 to 8 runs does",
                _RUNS,
            ),
            "/api/runs/{key}": _get("One run: state, last values, findings of the alert rules", _KEY),
            "/api/runs/{key}/version": _get(
                "A text that changes whenever the run's files do, and its state", _KEY
            ),
            "/api/runs/{key}/charts": _get("Vega-Lite specifications and their thinned data", _KEY),
            "/api/runs/{key}/tables/{table}": _get(
                "Live rows of a table, by step",
                _KEY,
                {"name": "table", "in": "path", "required": True, "schema": {"type": "string"}},
                _query("columns", "string", f"comma-separated, {MOST_COLUMNS} at most"),
                _query("from", "integer", "first step"),
                _query("to", "integer", "last step"),
                _query("limit", "integer", f"rows, {MOST_ROWS} at most; 1000 by default"),
            ),
            "/metrics": _get("Prometheus gauges of live and of the newest runs", kind="text/plain"),
        },
    }
