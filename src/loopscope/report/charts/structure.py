"""Structure of the choice of experts: margins against a null, specialisation, and what stayed since the last probe."""

from __future__ import annotations

from typing import Any

from loopscope.report.chart import Chart, ChartData
from loopscope.report.charts.maps import Map, maps
from loopscope.report.queries import RunQueries, visit_label
from loopscope.report.widgets import matrix

_KINDS = {"domain": "domain {}", "vocabulary": "vocabulary", "coactivation": "co-activation"}
_SATURATION = Map(
    id="saturation", column="saturation", title="Choices that stayed since the deep probe before", least=0.0, most=1.0,
    text="Share of a token's experts that are the same. Towards 1 routing no longer changes; chance gives k/E.",
)  # fmt: skip


def structure(queries: RunQueries) -> list[Chart]:
    """At the last deep probe, and saturation over all of them."""
    return [*_margins(queries), *_specialisation(queries), *_saturation(queries)]


def _margins(queries: RunQueries) -> list[Chart]:
    if not queries.has("probe_margin"):
        return []
    rows = last_visits(
        queries,
        "probe_margin",
        "quantity, rho_cal, rho_cal_low, rho_cal_high, cell, calibrated, shuffle_scope",
    )
    data = [
        {
            "visit": visit_label(r), "quantity": str(r["quantity"]).replace("_", " "), "rho": r["rho_cal"],
            "low": r["rho_cal_low"], "high": r["rho_cal_high"], "reading": str(r["cell"] or "not known"),
        }
        for r in rows if r["rho_cal"] is not None
    ]  # fmt: skip
    bounded = " Scores here are bounded, so that 1 is not what chance gives." if any(
        r["calibrated"] is False for r in rows
    ) else ""  # fmt: skip
    cells = ", ".join(sorted({str(r["cell"]) for r in rows if r["cell"]}))
    return [
        Chart(
            id="margin_null",
            title="Margin against a null without structure",
            text=f"At the probe after step {rows[0]['step']}, shuffled within: {rows[0]['shuffle_scope']}. 1: as by "
            f"chance, above it the choice has structure.{bounded} Read as: {cells or 'not known'}.",
            spec=_by_visit(
                data, "quantity", "rho", "ρ calibrated", extra=("low", "high"), names=("reading",)
            ),
            data=ChartData.of(data),
            metrics=(("probe_margin", "rho_cal"),),
            scope=queries.scope("probe_margin").words,
            notes=queries.missing("probe_margin", ("rho_cal",)),
        )
    ]


def _specialisation(queries: RunQueries) -> list[Chart]:
    if not queries.has("probe_specialisation"):
        return []
    rows = last_visits(queries, "probe_specialisation", "kind, stratum, value, chance")
    data = [
        {
            "visit": visit_label(r), "of": _KINDS.get(r["kind"], f"{r['kind']} {{}}").format(r["stratum"]),
            "times": r["value"] / r["chance"], "value": r["value"], "chance": r["chance"],
        }
        for r in rows if r["value"] is not None and r["chance"]
    ]  # fmt: skip
    return [
        Chart(
            id="specialisation",
            title="What experts are chosen for, in units of chance",
            text=f"At the probe after step {rows[0]['step']}. Domain: the share of its tokens that go to its favourite "
            "expert. Vocabulary: the same per word. Co-activation: how often two experts are chosen together. "
            "1: no more than by chance.",
            spec=_by_visit(data, "of", "times", "value / chance", extra=("value", "chance")),
            data=ChartData.of(data),
            metrics=(("probe_specialisation", "value"), ("probe_specialisation", "chance")),
            scope=queries.scope("probe_specialisation").words,
            notes=queries.missing("probe_specialisation", ("value",)),
        )
    ]


def _saturation(queries: RunQueries) -> list[Chart]:
    return maps(queries, "probe_saturation", (_SATURATION,)) if queries.has("probe_saturation") else []


def _by_visit(data: list[dict[str, Any]], x: str, value: str, title: str, **more: Any) -> Any:
    """Depth from the top down, as in every map; grey is 1."""
    lows, highs = (
        min((row[value] for row in data), default=0.0),
        max((row[value] for row in data), default=2.0),
    )
    # Near 1 as far to either side, so that a shade means the same; nothing is below 0.
    furthest = max(highs - 1, 1 - lows, 0.1)
    visits = len({row["visit"] for row in data})
    return matrix(
        x=x, y="visit", value=value, title=title, middle=1, domain=[max(0.0, 1 - furthest), 1 + furthest], x_title="",
        y_title="", labels=True, ordered=True, height=max(80, 20 * visits), **more,
    )  # fmt: skip


def last_visits(queries: RunQueries, table: str, columns: str) -> list[dict[str, Any]]:
    """Rows of the last probe in the order of depth, with b, r, l."""
    visits = queries.visits(table)
    where = queries.scope(table).where
    return queries.rows(
        f"select step, b, r, l, {columns} from {visits} "
        f"where step = (select max(step) from {table} where {where}) order by b, r, l"
    )
