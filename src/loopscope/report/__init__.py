"""A run as one HTML file that works offline. Never imports torch.

run → analysis (findings, DuckDB) → charts/*.py: one `Section` each, Vega-Lite specifications and Arrow columns →
page.py: Jinja2 template, columnar JSON, script bundle → report.html
"""

from loopscope.report.page import write_report

__all__ = ["write_report"]
