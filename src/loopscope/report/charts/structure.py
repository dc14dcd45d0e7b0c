"""Structure of the choice of experts: margins against a null, specialisation, and what stayed since the last probe."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from loopscope.catalog.registry import TABLES
from loopscope.report.chart import Chart
from loopscope.report.charts.router import maps
from loopscope.report.queries import RunQueries
from loopscope.report.widgets import matrix


def structure(queries: RunQueries) -> list[Chart]:
    """At the last deep probe, and saturation over all of them."""
    saturation = maps(queries, "probe_saturation", TABLES["probe_saturation"].columns)
    return [*_margins(queries), *_specialisation(queries), *saturation]


def _margins(queries: RunQueries) -> list[Chart]:
    rows = queries.last_visits(
        "probe_margin",
        "replace(quantity, '_', ' ') as quantity, rho_cal as rho, rho_cal_low as low, rho_cal_high as high, "
        "coalesce(cell, 'not known') as reading, cell, calibrated, shuffle_scope",
    )
    if not rows.num_rows:
        return []
    bounded = pc.any(pc.equal(rows["calibrated"], False)).as_py()
    said = " Scores here are bounded, so that 1 is not what chance gives." if bounded else ""
    cells = ", ".join(sorted(filter(None, rows["cell"].unique().to_pylist())))
    data = rows.select(("visit", "quantity", "rho", "low", "high", "reading")).filter(rows["rho"].is_valid())
    return [
        queries.chart(
            "probe_margin",
            ("rho_cal",),
            id="margin_null",
            title="Margin against a null without structure",
            text=f"At the probe after step {rows['step'][0]}, shuffled within: {rows['shuffle_scope'][0]}. 1: as by "
            f"chance, above it the choice has structure.{said} Read as: {cells or 'not known'}.",
            spec=_by_visit(
                data, "quantity", "rho", "ρ calibrated", extra=("low", "high"), names=("reading",)
            ),
            data=data,
        )
    ]


def _specialisation(queries: RunQueries) -> list[Chart]:
    rows = queries.last_visits(
        "probe_specialisation",
        "case kind when 'domain' then 'domain ' || stratum when 'vocabulary' then kind "
        "when 'coactivation' then 'co-activation' else kind || ' ' || stratum end as of, "
        "value, nullif(chance, 0) as chance",
    )
    if not rows.num_rows:
        return []
    rows = rows.append_column("times", pc.divide(rows["value"], rows["chance"]))
    data = rows.select(("visit", "of", "times", "value", "chance")).filter(rows["times"].is_valid())
    return [
        queries.chart(
            "probe_specialisation",
            ("value", "chance"),
            missing=("value",),
            id="specialisation",
            title="What experts are chosen for, in units of chance",
            text=f"At the probe after step {rows['step'][0]}. Domain: the share of its tokens that go to its favourite "
            "expert. Vocabulary: the same per word. Co-activation: how often two experts are chosen together. "
            "1: no more than by chance.",
            spec=_by_visit(data, "of", "times", "value / chance", extra=("value", "chance")),
            data=data,
        )
    ]


def _by_visit(data: pa.Table, x: str, value: str, title: str, **more: Any) -> Any:
    """Depth from the top down, as in every map; grey is 1."""
    found = pc.min_max(data[value]).as_py() if data.num_rows else {"min": 0.0, "max": 2.0}
    # Near 1 as far to either side, so that a shade means the same; nothing is below 0.
    furthest = max(found["max"] - 1, 1 - found["min"], 0.1)
    return matrix(
        x=x, y="visit", value=value, title=title, middle=1, domain=[max(0.0, 1 - furthest), 1 + furthest], x_title="",
        y_title="", labels=True, ordered=True, height=max(80, 20 * len(data["visit"].unique())), **more,
    )  # fmt: skip
