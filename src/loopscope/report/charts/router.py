"""What the routers do: step × depth maps."""

from __future__ import annotations

from loopscope.catalog.registry import TABLES
from loopscope.report.chart import Section
from loopscope.report.charts.maps import maps
from loopscope.report.queries import RunQueries


def section(queries: RunQueries) -> Section:
    """One map per column that the catalogue has a picture of."""
    if not queries.has("router"):
        text = "The run has no row of the table router: it was not traced, or its layers have no router."
        return Section(id="router", nav="Routing", title="Routing", text=text)
    text = (
        "Depth runs from the top down, in the order of execution; training from left to right. A cell holds from "
        "one trace to the next. A grey cell is missing, and says why; an empty one was not traced."
    )
    charts = maps(queries, "router", TABLES["router"].columns)
    return Section(
        id="router", nav="Routing", title="Routing over training and depth", charts=charts, text=text
    )
