"""`loopscope metrics`: every metric with its formula, from the registry."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from loopscope.metrics.docs import EVERY
from loopscope.metrics.metric import Table as TableName


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """List every metric: column, type, formula, unit, how it merges, and when it is null."""

    table: TableName | None = None
    """Only the metrics of this table."""
    json: bool = False
    """Print them as JSON, by table.column."""

    def run(self) -> int:
        """Print the list; always 0."""
        if self.json:
            print(as_json(self.table))
            return 0
        console = Console()
        for name in dict.fromkeys(owner for owner, _ in EVERY):
            if self.table in (None, name):
                console.print(_rendered(name))
        return 0


def as_json(table: TableName | None = None) -> str:
    """One object: "table.column" → its definition in words."""
    entries = (
        f"{json.dumps(f'{owner}.{metric.name}')}: " + json.dumps(
            {
                "formula": metric.formula, "unit": metric.unit, "merge": metric.merge, "null": metric.null_rule,
                "source": metric.source,
            },
            ensure_ascii=False,
        )
        for (owner, _), metric in EVERY.items() if table in (None, owner)
    )  # fmt: skip
    return "{\n" + ",\n".join(entries) + "\n}"


def _rendered(name: str) -> Table:
    rendered = Table(title=name, title_justify="left", title_style="bold", show_lines=False)
    rendered.add_column("column", no_wrap=True, style="cyan")
    for heading in ("type", "formula", "unit", "merges by", "null when"):
        rendered.add_column(heading, overflow="fold")
    for (owner, _), metric in EVERY.items():
        if owner == name:
            cells = (metric.name, metric.kind, metric.formula, metric.unit, metric.merge, metric.null_rule)
            rendered.add_row(*(cell.replace("[", "\\[") for cell in cells))
    return rendered
