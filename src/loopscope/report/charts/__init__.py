"""The sections of the report: each function makes one of a run's queries, with words alone where there is no data."""

from loopscope.report.charts import deep, health, loop, loss, overlap, probe, router

SECTIONS = (
    loss.section,
    router.section,
    router.experts,
    loss.training,
    loop.section,
    overlap.section,
    probe.section,
    deep.section,
    health.section,
)
"""In the order of the page."""
