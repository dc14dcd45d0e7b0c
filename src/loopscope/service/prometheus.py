"""The text that Prometheus reads: a bounded number of gauges per run, a bounded number of runs."""

import math
from collections.abc import Iterable
from typing import Any

from loopscope.catalog.registry import GAUGES
from loopscope.service.catalog import CatalogEntry

MOST_RUNS = 50
"""Runs with gauges: live ones first, then the newest."""
_MOST_NAME = 120
"""Characters of a run's name in a label."""

_GAUGES = {
    "step": "last optimizer step with a row of losses",
    "tokens_seen": "training tokens up to that step",
    **{gauge.name: gauge.help for gauge in GAUGES.values() if gauge.headline},
}


def exposition(runs: Iterable[tuple[CatalogEntry, str, dict[str, Any]]], listed: int) -> str:
    """Gauges of (entry, state, headline) triples; a value that is not known has no sample.

    Args:
        runs: the runs with gauges.
        listed: how many runs there are in all.
    """
    known = list(runs)
    lines = [*_head("runs", "runs below the folder"), f"loopscope_runs {listed}"]
    for name, said in _GAUGES.items():
        lines += _head(name, said)
        for entry, _, found in known:
            if (sample := found.get(name)) is not None and math.isfinite(sample):
                lines.append(f"loopscope_{name}{{{_labels(entry)}}} {sample}")
    lines += _head("live", "1 while somebody writes the run")
    lines += [f"loopscope_live{{{_labels(entry)}}} {int(state == 'running')}" for entry, state, _ in known]
    lines += _head("alerts", "alert rules that are broken now, by severity")
    for entry, _, found in known:
        for severity in ("warn", "critical"):
            lasting = sum(1 for f in found.get("findings", ()) if f["severity"] == severity and not f["over"])
            lines.append(f'loopscope_alerts{{{_labels(entry)},severity="{severity}"}} {lasting}')
    return "\n".join(lines) + "\n"


def _head(name: str, said: str) -> list[str]:
    return [f"# HELP loopscope_{name} {said}", f"# TYPE loopscope_{name} gauge"]


def _labels(entry: CatalogEntry) -> str:
    name = entry.name[:_MOST_NAME].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'run="{name}",key="{entry.key}"'
