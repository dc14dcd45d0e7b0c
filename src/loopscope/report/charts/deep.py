"""The deep probe: what each pass through the loop adds, structure of the choice, growth of a disturbance."""

from __future__ import annotations

from loopscope.report.chart import Section
from loopscope.report.charts.disturbance import disturbances
from loopscope.report.charts.readout import readouts
from loopscope.report.charts.structure import structure
from loopscope.report.queries import RunQueries


def section(queries: RunQueries) -> Section:
    """Readouts over training; structure and disturbances, per visit."""
    charts = [*readouts(queries), *structure(queries), *disturbances(queries)]
    text = "On the fixed corpus, at steps at which the deep probe ran."
    if not charts:
        text = "The run has no deep probe."
    return Section(id="deep", nav="Depth", title="What the depth is good for", charts=charts, text=text)
