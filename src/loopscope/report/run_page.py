"""One run's page: findings, facts, sections."""

from dataclasses import dataclass
from typing import Any

from loopscope.alerts import Bounds, Rule, rules_at
from loopscope.analysis import Run
from loopscope.analysis.health_findings import Finding, Findings, findings
from loopscope.report.chart import Section
from loopscope.report.charts import SECTIONS
from loopscope.report.checks import Check, checks, tally
from loopscope.report.columnar import columnar
from loopscope.report.queries import RunQueries
from loopscope.report.run_info import run_info

HEADLINES = {
    "critical": "Something is wrong",
    "warn": "Something needs a look",
    "ok": "Nothing to report: every rule is kept",
    "young": "Nothing to report so far; the run is young",
    "empty": "There are no rows yet",
}
"""State → the first sentence that people read."""

_MOST_NAME = 120

# The chart that a rule points at may not exist in this run; then its section is the place.
_SECTION_OF = {
    "closure": "s-loss", "health": "s-health", "coverage": "s-health", "dead": "s-router", "token_entropy": "s-router",
    "load_entropy": "s-router", "maxvio": "s-router", "z": "s-router", "growth": "s-loop", "relative_delta": "s-loop",
    "token_correlation": "s-loop",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPage:
    """Everything that the page says of one run."""

    key: str
    """Prefix of its identifiers in the page."""
    name: str
    """The run's name, or its folder's; anybody may have chosen it."""
    info: list[tuple[str, str]]
    """What the run is: names and texts."""
    findings: Findings
    sections: list[Section]
    checks: list[Check]
    """What was checked, healthy or not."""

    @property
    def tally(self) -> str:
        """All checks in one sentence; empty where there are none."""
        return tally(self.checks) if self.checks else ""

    @property
    def state(self) -> str:
        """The worst finding that lasts."""
        return self.findings.state

    @property
    def headline(self) -> str:
        """The first sentence."""
        return HEADLINES[self.state]

    def place(self, chart: str) -> str:
        """Where a chart or table is; its section where this run has none."""
        shown = {each.id for section in self.sections for each in section.charts}
        shown |= {each.id for section in self.sections for each in section.tables}
        return f"{self.key}-{chart if chart in shown else _SECTION_OF.get(chart, 's-health')}"

    def rule(self, finding: Finding) -> Rule:
        """The finding's rule, for its reason and the bound that the run was judged by."""
        return rules_at(self.findings.settings)[finding.rule]


def shown_name(name: str) -> str:
    """A run's name, which anybody may have chosen: short, and without signs that turn or hide the text around it.

    >>> shown_name("a\\u202eb"), len(shown_name("x" * 3000))
    ('a\ufffdb', 120)
    """
    clean = "".join(sign if sign.isprintable() else "\ufffd" for sign in name)
    return clean if len(clean) <= _MOST_NAME else clean[: _MOST_NAME - 1] + "…"


def read_run_page(run: Run, key: str, bounds: Bounds = None) -> RunPage:
    """Read a run once, and put its page together; judged by its own bounds where no others are given."""
    found = findings(run, bounds)
    queries = RunQueries(run, found.settings)
    return RunPage(
        key=key,
        name=shown_name(run.manifest.run_name or run.path.name),
        info=run_info(queries),
        findings=found,
        sections=[section(queries) for section in SECTIONS],
        checks=checks(queries, found) if found.judged else [],
    )


def chart_json(page: RunPage) -> dict[str, Any]:
    """Identifier → specification and columns, as the page's script reads them."""
    return {
        f"{page.key}-{chart.id}": {"spec": chart.spec, "data": columnar(chart.data)}
        for section in page.sections
        for chart in section.charts
        if chart.data.num_rows
    }
