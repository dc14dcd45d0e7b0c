"""One traced forward: what the boundaries handed over, in call order, made into TracePoints at its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from loopscope.capture import proof
from loopscope.capture.errors import CoverageError, ReconcileError
from loopscope.capture.nearest import shortened
from loopscope.capture.points import Checks, point_of, router_fields
from loopscope.capture.source import Call, Source
from loopscope.capture.spec import CapturePlan
from loopscope.capture.values import plain_tensor
from loopscope.capture.visits import meta_of, plan_visits
from loopscope.trace import TraceMeta, TracePoint, VisitSpec

__all__ = ["Boundary", "Window", "boundaries_of", "router_fields"]


@dataclass(slots=True)
class _Visit:
    block: str
    residual: Tensor
    router: dict[str, Tensor]
    expert_rows: dict[str, int]
    """Boundary of one expert → tokens that it was called with."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A boundary of the plan with its sources parsed and its block found, ready for calls."""

    name: str
    block: str
    sources: Mapping[str, Source]
    is_block: bool


def boundaries_of(plan: CapturePlan) -> dict[str, Boundary]:
    """Every boundary that gives something, by module name."""
    return {
        name: Boundary(name, block, spec.sources(f"plan[{name!r}]"), name == block)
        for block in plan.blocks()
        for name, spec in {**plan.parts_of(block), block: plan[block]}.items()
    }


@dataclass(slots=True)
class Window:
    """Collects the calls of one forward. Hooks call `record`; `points` ends it."""

    plan: CapturePlan
    visits: list[_Visit] = field(default_factory=list)
    pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    expert_rows: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def record(self, boundary: Boundary, call: Call) -> None:
        """Take a boundary's tensors from one call. Never raises inside a model's forward: a problem is kept as
        text and raised at the window's end."""
        try:
            taken = {name: self.take(source.read(call), name) for name, source in boundary.sources.items()}
        except Exception as error:  # noqa: BLE001 - a decoder, a property of somebody's module: anything
            name = "" if isinstance(error, ReconcileError) else f"{type(error).__name__}: "
            self.problems.append(f"{boundary.name}: {name}{error}")
            return
        residual = taken.pop("residual", None)
        if (given := taken.pop("expert_input", None)) is not None:
            rows = self.expert_rows.setdefault(boundary.block, {})
            rows[boundary.name] = rows.get(boundary.name, 0) + prod(given.shape[:-1])
        if taken:
            waiting = self.pending.setdefault(boundary.block, {})
            if any(name in waiting for name in taken):
                self.problems.append(
                    f"{boundary.name}: its router ran twice in one call of {boundary.block!r}"
                )
            waiting.update(taken)
        if boundary.is_block and residual is not None:
            router, rows = self.pending.pop(boundary.block, {}), self.expert_rows.pop(boundary.block, {})
            self.visits.append(_Visit(boundary.block, residual, router, rows))

    def specs(self) -> list[VisitSpec]:
        """Coordinates of the visits so far."""
        return plan_visits(self.plan, self.blocks())

    def meta(self) -> TraceMeta:
        """The TraceMeta of this forward."""
        return meta_of(self.specs())

    def points(self, *, verify: bool = True) -> list[TracePoint]:
        """Every visit as a TracePoint, proven.

        Args:
            verify: reconcile each router's choice with its captured scores (one read from the device in all).

        Raises:
            CoverageError: a boundary of the plan was never called.
            ReconcileError: what was captured is not what the model used.
        """
        if self.problems:
            raise ReconcileError("; ".join(self.problems))
        self._check_calls()
        checks: Checks = []
        found = [
            point_of(
                visit.block,
                visit.residual,
                visit.router,
                self.plan.routing_of(visit.block),
                at,
                checks if verify else None,
                self._rows_of(visit),
            )
            for visit, at in zip(self.visits, self.specs(), strict=True)
        ]
        if checks:
            device = checks[0][-1].device  # the layers of one model may lie on several
            counts = torch.stack([counts.to(device) for *_, counts in checks]).tolist()
            for (where, spec, tokens, _), wrong in zip(checks, counts, strict=True):
                proof.raise_if_wrong(wrong, tokens, spec, where)
        return found

    def _rows_of(self, visit: _Visit) -> list[int] | None:
        experts = self.plan.experts_of(visit.block)
        return [visit.expert_rows.get(name, 0) for name in experts] if experts else None

    def take(self, value: Any, name: str) -> Any:
        """What is kept of a value that a source named: a tensor without its graph, local to this rank."""
        return plain_tensor(value, name)

    def blocks(self) -> list[str]:
        """The block of each visit so far, in call order."""
        return [visit.block for visit in self.visits]

    def clear(self) -> None:
        """Let go of every tensor."""
        self.visits.clear()
        self.pending.clear()
        self.expert_rows.clear()

    def _check_calls(self) -> None:
        if silent := [name for name in self.plan.blocks() if name not in self.blocks()]:
            raise CoverageError(
                f"{len(silent)} of {len(self.plan.blocks())} captured modules were not called, or their hooks did not "
                f"run: {shortened(silent)}. A compiled graph runs no hook that came after it: compile blocks with "
                "`block.compile()`, or the model with `torch.compile(model)`, and attach to what you call."
            )
        for visit in self.visits:
            if not visit.router and self.plan.parts_of(visit.block):
                raise CoverageError(
                    f"{visit.block}: its router was not called in a visit, or its hook did not run."
                )
