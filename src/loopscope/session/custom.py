"""The user's own metrics: built once, run on every traced forward, written as health rows."""

from collections.abc import Mapping
from typing import Any

from loopscope.capture.adapter import Adapter
from loopscope.capture.spec import enclosing
from loopscope.collect import Collector
from loopscope.trace import TracePoint


class CustomMetrics:
    """The reducers of a plan, with their context filled in.

    Args:
        adapter: its plan holds the reducers.
        meshes: context by name.

    Raises:
        PlanError: a reducer wants context that is not there.
    """

    def __init__(self, adapter: Adapter, meshes: Mapping[str, Any]) -> None:
        blocks = adapter.plan.blocks()
        self._reducers = [
            (
                enclosing(name, blocks) or name,
                bound.factory.name,
                bound.build({**meshes, "module": adapter.module(name)}),
            )
            for name, spec in adapter.plan.items()
            for bound in spec.reducers
        ]

    def run(self, collector: Collector, step: int, points: list[TracePoint], blocks: list[str]) -> None:
        """One health row ``custom:NAME.KEY`` per visit and value; every rank comes here in the same order."""
        for block, name, reduce in self._reducers:
            for point in [one for one, owner in zip(points, blocks, strict=True) if owner == block]:
                for key, value in reduce(point.tensors()).items():
                    collector.record_event(
                        step,
                        f"custom:{name}.{key}",
                        "info",
                        unrolled_pos=point.unrolled_pos,
                        value=float(value),
                    )
