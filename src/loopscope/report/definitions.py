"""What the drawn columns mean: the documentation that travels with the file.

The registry of metrics needs torch, a report does not: `assets/metrics.json` is the registry's text, written by
`loopscope metrics --json`; a test holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from loopscope.store import TABLES

# Columns that are no metric: keys, and what an event's value means.
_OWN: Mapping[str, tuple[str, str]] = {
    "loss.tokens_seen": ("training tokens up to and including this step, over all ranks", "tokens"),
    "loss.elapsed_s": ("seconds since the attempt began, on a monotonic clock", "s"),
    "health.event": ("what happened", "text"),
    "health.value": ("coverage: visits seen / visits expected; timing: seconds of a traced step", "1 or s"),
    "health.count": ("how many: rows dropped, values not finite, visits missing", "of the event"),
}
# Its columns are the router's, over another text.
_SAME_AS = {"probe_router": "router"}


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
    """The column's definition: the registry's, else the schema's; empty where neither says anything."""
    key = f"{_SAME_AS.get(table, table)}.{name}"
    if key in _registry():
        return Definition(table=table, name=name, **_registry()[key])
    if key in _OWN:
        formula, unit = _OWN[key]
        return Definition(table=table, name=name, formula=formula, unit=unit)
    columns = TABLES[table].columns if table in TABLES else ()
    formula = next((column.doc for column in columns if column.name == name), "")
    return Definition(table=table, name=name, formula=formula, unit="1")


def glossary(metrics: Iterable[tuple[str, str]]) -> list[Definition]:
    """Each drawn column once, in the order of the tables."""
    order = list(TABLES)
    return [
        definition(*m)
        for m in sorted(set(metrics), key=lambda m: (order.index(m[0]) if m[0] in order else 99, m))
    ]


@cache
def _registry() -> Mapping[str, dict[str, str]]:
    text = files("loopscope.report").joinpath("assets", "metrics.json").read_text(encoding="utf-8")
    known: Mapping[str, dict[str, str]] = json.loads(text)
    return known
