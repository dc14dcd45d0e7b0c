"""A run as one HTML file that works offline. Never imports torch.

run → analysis (findings, DuckDB) → charts/*.py: one `charts(look)` per section, Altair specifications and
columnar data → page.py: Jinja2 template, script bundle → report.html
"""

from loopscope.report.page import write_report

__all__ = ["write_report"]
