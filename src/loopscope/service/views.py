"""What is read of a run, once per change of its files, however many ask."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from loopscope.alerts import Bounds
from loopscope.analysis import Run, open_run
from loopscope.analysis.health_findings import findings
from loopscope.analysis.records import records, value
from loopscope.analysis.scope import scope_of
from loopscope.report.part import Part, part_of
from loopscope.service.catalog import Entry

T = TypeVar("T")
_KEPT = 64

# Name of the gauge → (table, SQL over the last step's rows)
HEADLINES = {
    "loss_task": ("loss", "any_value(task_loss)"),
    "loss_total": ("loss", "any_value(total_loss)"),
    "moe_lb_loss": ("loss", "any_value(lb_loss)"),
    "moe_maxvio_max": ("router", "max(maxvio_count)"),
    "moe_dead": ("router", "sum(dead_experts)"),
    "moe_load_entropy_min": ("router", "min(load_entropy_ratio)"),
    "moe_z_mean": ("router", "avg(z_mean)"),
    "moe_logit_abs_max": ("router", "max(logit_abs_max)"),
    "loop_relative_delta_last": (
        "transition",
        "arg_max(relative_delta, to_pos) filter (kind = 'step_boundary')",
    ),
    "loop_growth_last": ("transition", "arg_max(growth, to_pos) filter (kind = 'step_boundary')"),
    "loop_token_corr_last": ("residual", "arg_max(token_correlation, unrolled_pos) filter (block = 'loop')"),
    "probe_loss": ("probe_loss", "any_value(loss_mean) filter (stratum_kind = 'all')"),
}


class Views:
    """Results by run and by the version of its files; the least recently asked ones are forgotten."""

    def __init__(self, settings: Bounds = None) -> None:
        self.settings = settings
        self._kept: OrderedDict[tuple[str, str], tuple[str, Any]] = OrderedDict()
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}

    async def part(self, entry: Entry) -> Part:
        """The run's part of a page."""
        return await self._of(entry, "part", lambda: part_of(open_run(entry.path), "r0", self.settings))

    async def headline(self, entry: Entry) -> dict[str, Any]:
        """The run's last values and alerts, in a few small queries."""
        return await self._of(entry, "headline", lambda: headline(open_run(entry.path), self.settings))

    async def _of(self, entry: Entry, what: str, make: Callable[[], T]) -> T:
        key = (entry.key, what)
        # One makes it, the others wait for it: fifty pages on one live run cost as much as one.
        async with self._locks.setdefault(key, asyncio.Lock()):
            version = await run_in_threadpool(entry.version)
            kept = self._kept.get(key)
            if kept is not None and kept[0] == version:
                self._kept.move_to_end(key)
                return kept[1]  # type: ignore[no-any-return]
            made = await run_in_threadpool(make)
            self._kept[key] = (version, made)
            while len(self._kept) > _KEPT:
                old, _ = self._kept.popitem(last=False)
                self._locks.pop(old, None)
            return made


def headline(run: Run, settings: Bounds) -> dict[str, Any]:
    """Plain values for the list, the API and the gauges; what is not known is null."""
    found: dict[str, Any] = {"step": None, "tokens_seen": None, "wall_time": None}
    for row in _last(
        run, "loss", "max(step) as step, max(tokens_seen) as tokens_seen, max(wall_time) as wall_time"
    ):
        found |= row
    if found["wall_time"] is not None:
        found["wall_time"] = found["wall_time"].isoformat()
    for table in dict.fromkeys(table for table, _ in HEADLINES.values()):
        wanted = ", ".join(f"{sql} as {name}" for name, (of, sql) in HEADLINES.items() if of == table)
        for row in _last(run, table, wanted):
            found |= {name: _finite(cell) for name, cell in row.items()}
    found = {**dict.fromkeys(HEADLINES), **found}
    result = findings(run, settings)
    found["health"] = result.state
    found["findings"] = [
        {"rule": f.rule, "severity": f.severity, "over": f.over, "title": f.title, "text": f.text}
        for f in result.found
    ]
    return found


def _finite(cell: Any) -> float | None:
    return float(cell) if cell is not None and math.isfinite(cell) else None


def _last(run: Run, table: str, wanted: str) -> list[dict[str, Any]]:
    if table not in run.tables:
        return []
    where = scope_of(run, table).where
    step = value(run, f"select max(step) from {table} where {where}")
    return (
        []
        if step is None
        else list(records(run, f"select {wanted} from {table} where {where} and step = {step}"))
    )
