"""`loopscope metrics`: every metric with its formula, from the catalogue."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from loopscope.catalog.registry import METRICS, TABLES
from loopscope.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """List every metric: column, type, formula, unit, how it merges, and when it is null."""

    table: Annotated[str | None, tyro.conf.arg(metavar="TABLE")] = None
    """Only the metrics of this table."""
    json: bool = False
    """Print them as JSON, by table.column."""

    def run(self) -> int:
        """Print the list; always 0."""
        tables = dict.fromkeys(table for table, _ in METRICS)
        if self.table is not None and self.table not in tables:
            raise ConfigError(
                f"there is no table {self.table!r} of metrics; expected one of {', '.join(tables)}"
            )
        wanted = tables if self.table is None else {self.table: None}
        if self.json:
            print(_as_json(wanted))
        else:
            Console().print(*(_rendered(name) for name in wanted))
        return 0


def _as_json(tables: dict[str, None]) -> str:
    """One object: "table.column" → its definition in words."""
    found = {
        f"{table}.{name}": {
            "formula": c.formula,
            "unit": c.unit,
            "merge": c.merge,
            "null": c.null_rule,
            "source": c.source,
        }
        for (table, name), c in METRICS.items()
        if table in tables
    }
    return json.dumps(found, ensure_ascii=False, indent=2)


def _rendered(name: str) -> Table:
    rendered = Table(title=name, title_justify="left", title_style="bold", show_lines=False)
    rendered.add_column("column", no_wrap=True, style="cyan")
    for heading in ("type", "formula", "unit", "merges by", "null when"):
        rendered.add_column(heading, overflow="fold")
    for column in TABLES[name].metrics.values():
        cells = (column.name, column.type, column.formula, column.unit, column.merge, column.null_rule)
        rendered.add_row(*(cell.replace("[", "\\[") for cell in cells))
    return rendered
