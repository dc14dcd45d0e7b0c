"""What the drawn columns mean: the glossary at the end of the page, from the catalogue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loopscope.catalog.registry import TABLES


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """One column, for the glossary at the end of the page."""

    table: str
    name: str
    formula: str
    unit: str
    merge: str = ""
    """How it merges over microbatches and ranks."""
    null: str = ""
    """When it is null, and with which reason."""
    source: str = ""
    """Where the definition comes from."""

    @property
    def anchor(self) -> str:
        """Identifier in the page."""
        return f"m-{self.table}-{self.name}"


def definition(table: str, name: str) -> Definition:
    """The column's definition; empty where the catalogue does not know it."""
    column = TABLES[table].by_name.get(name) if table in TABLES else None
    if column is None:
        return Definition(table=table, name=name, formula="", unit="1")
    return Definition(
        table=table,
        name=name,
        formula=column.formula,
        unit=column.unit or "1",
        merge=column.merge,
        null=column.null_rule,
        source=column.source,
    )


def glossary(metrics: Iterable[tuple[str, str]]) -> list[Definition]:
    """Each drawn column once, in the order of the tables."""
    order = list(TABLES)
    return [
        definition(*m)
        for m in sorted(set(metrics), key=lambda m: (order.index(m[0]) if m[0] in order else 99, m))
    ]
