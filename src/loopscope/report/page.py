"""The page: Jinja2 with autoescape, one script bundle, no address outside the file."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from loopscope import __version__
from loopscope.alerts import Bounds
from loopscope.analysis import Run
from loopscope.catalog.registry import TABLES
from loopscope.catalog.table import Column
from loopscope.errors import ConfigError, StoreError
from loopscope.report.checks import SIGNS
from loopscope.report.compare import Axis, comparison
from loopscope.report.run_page import RunPage, chart_json, read_run_page

MOST_RUNS = 8
"""Runs in one page."""


def write_report(
    runs: Sequence[Run], path: str | Path, *, settings: Bounds = None, by: Axis = "step"
) -> list[RunPage]:
    """Write one self-contained HTML file about 1 to 8 runs.

    Args:
        runs: opened runs; with more than one, the page begins with their comparison.
        path: the file; its folder must exist. It is replaced as a whole or not at all.
        settings: bounds of the alert rules, instead of the runs' own.
        by: what several runs are aligned by: optimizer steps or training tokens.

    Returns:
        What the page says of each run.

    Raises:
        ConfigError: no run, or more than 8.
        StoreError: the file cannot be written.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ConfigError(
            f"got {len(runs)} runs, expected 1 to {MOST_RUNS}. Name fewer runs, or make several reports."
        )
    with ThreadPoolExecutor(1) as pool, ExitStack() as quiet:
        for run in runs:  # the page itself begins with what it lacks
            quiet.enter_context(run.reader.quietly())
        # Seconds of work that need none of the rows.
        bundle = pool.submit(script_bundle)
        pages = [read_run_page(run, f"r{index}", settings) for index, run in enumerate(runs)]
        compared = comparison(runs, [page.name for page in pages], by) if len(runs) > 1 else None
        text = render(pages, compared, bundle.result())
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    try:
        # A folder's name need not be valid text, nor need what run.json says.
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"{target} cannot be written: {error.strerror or error}") from None
    return pages


def render(
    pages: Sequence[RunPage], compared: RunPage | None, bundle: str, *, live: str = "", nonce: str = ""
) -> str:
    """The page's text.

    Args:
        pages: what is said of each run.
        compared: the comparison, before them.
        bundle: the drawing script; empty where the page loads it from its own server.
        live: address on the page's own server that says whether there is something new; empty for a file.
        nonce: what the server's policy lets scripts run by; empty for a file.
    """
    everything = [*([compared] if compared else []), *pages]
    charts = {name: chart for page in everything for name, chart in chart_json(page).items()}
    return environment().get_template("report.html.j2").render(
        pages=pages,
        compared=compared,
        title=", ".join(page.name for page in pages) or "Comparison",
        charts=script_json(charts),
        bundle=Markup(bundle.replace("</script", "<\\/script")),
        style=Markup(asset("report.css")),
        script=Markup(asset("report.js")),
        glossary=glossary(everything),
        tables=TABLES,
        signs=SIGNS.values(),
        version=__version__,
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        live=live,
        nonce=nonce,
    )  # fmt: skip


def glossary(pages: Sequence[RunPage]) -> list[tuple[str, Column]]:
    """(table, column) of all that is drawn, in the order of the tables."""
    charts = (chart for page in pages for section in page.sections for chart in section.charts)
    drawn = sorted({metric for chart in charts for metric in chart.metrics})
    return [
        (table, TABLES[table].by_name[name]) for table in TABLES for owner, name in drawn if owner == table
    ]


@cache
def script_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from the installed vl-convert."""
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub is wrong
    return bundle


@cache
def environment() -> jinja2.Environment:
    """Every value is escaped, whatever the template's name; an unknown name is an error."""
    loader = jinja2.PackageLoader("loopscope.report", "assets")
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def script_json(data: Any) -> Markup:
    """JSON inside a script element: nothing in it can end the element or begin another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def asset(name: str) -> str:
    """A file of this package."""
    return files("loopscope.report").joinpath("assets", name).read_text(encoding="utf-8")
