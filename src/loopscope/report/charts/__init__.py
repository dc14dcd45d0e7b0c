"""The sections of the report, one per file: `section(queries)` gives a `Section`, empty where there is no data."""

from loopscope.report.charts import deep, experts, health, loop, loss, overlap, probe, router, speed

SECTIONS = (loss, router, experts, speed, loop, overlap, probe, deep, health)
"""In the order of the page."""
