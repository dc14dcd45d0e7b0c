"""One traced forward: what the boundaries handed over, in call order, made into TracePoints at its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from loopscope.capture import proof
from loopscope.capture.adapter import Remark
from loopscope.capture.chunks import in_chunks, tokens_given
from loopscope.capture.errors import CoverageError, ReconcileError
from loopscope.capture.execution import ExecutionRecord
from loopscope.capture.nearest import shortened
from loopscope.capture.points import Checks, point_of, router_fields
from loopscope.capture.source import Call, Source
from loopscope.capture.spec import CapturePlan
from loopscope.capture.values import plain_tensor
from loopscope.capture.visits import VisitPlaces
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
    is_beside: bool = False
    """It lies outside its block, and is called once for each of its visits."""


def boundaries_of(plan: CapturePlan) -> dict[str, Boundary]:
    """Every boundary that gives something, by module name."""
    return {
        name: Boundary(name, block, spec.sources(f"plan[{name!r}]"), name == block, spec.block is not None)
        for block in plan.blocks()
        for name, spec in {**plan.parts_of(block), block: plan[block]}.items()
    }


@dataclass(slots=True)
class Window:
    """Collects the calls of one forward. Hooks call `began` and `record` or `failed`; `points` ends it."""

    plan: CapturePlan
    places: VisitPlaces
    execution: ExecutionRecord = field(default_factory=ExecutionRecord)
    visits: list[_Visit] = field(default_factory=list)
    pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    beside: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    """Boundary outside its block → what its calls handed over."""
    expert_rows: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tokens_given: int | None = None
    """Tokens that the forward itself was given; None where that is not known."""

    def boundary_now(self, boundaries: Sequence[Boundary]) -> Boundary:
        """Which of several boundaries at one module a call is of: that of the block that runs."""
        running = (each for each in boundaries if self.execution.is_running(each.block))
        return next(running, boundaries[0])

    def began(self, boundary: Boundary, *, in_backward: bool = False) -> None:
        """A call of a boundary begins. What an earlier call of its block left and that did not end is forgotten."""
        self.execution.enter(boundary.name, in_backward=in_backward)
        if boundary.is_block and not in_backward:
            self._forget(boundary)

    def failed(self, boundary: Boundary) -> None:
        """A call of a boundary raised: tried again, it is the same visit."""
        self.execution.leave(boundary.name, failed=True)
        if boundary.is_block:
            self._forget(boundary)

    def record(self, boundary: Boundary, call: Call) -> None:
        """Take a boundary's tensors from one call. Never raises inside a model's forward: a problem is kept as
        text and raised at the window's end."""
        if not self.execution.leave(boundary.name):
            return  # a recompute of what was recorded already
        try:
            taken = {name: self.take(source.read(call), name) for name, source in boundary.sources.items()}
        except Exception as error:  # noqa: BLE001 - a decoder, a property of somebody's module: anything
            name = "" if isinstance(error, ReconcileError) else f"{type(error).__name__}: "
            self.problems.append(f"{boundary.name}: {name}{error}")
            return
        residual = taken.pop("residual", None)
        if boundary.is_beside:
            self.beside.setdefault(boundary.name, []).append(taken)
            return
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
        return self.places.visits(self.blocks(), lambda call: bool(self.visits[call].router))

    def meta(self) -> TraceMeta:
        """The TraceMeta of this forward."""
        return self.places.meta(self.specs())

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what the forward was called with."""
        self.tokens_given = tokens_given(args, kwargs)

    def points(self, *, verify: bool = True) -> list[TracePoint]:
        """Every visit as a TracePoint, proven.

        Args:
            verify: reconcile each router's choice with its captured scores (one read from the device in all).

        Raises:
            CoverageError: no boundary of the plan was called.
            ReconcileError: what was captured is not what the model used.
        """
        if self.problems:
            raise ReconcileError("; ".join(self.problems))
        if not self.visits:
            raise CoverageError(not_called(list(self.plan.blocks()), len(self.plan.blocks())))
        self._join_beside()
        traits = self._traits()
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
                traits.get(visit.block, ()),
            )
            for visit, at in zip(self.visits, self.specs(), strict=True)
        ]
        if checks:
            device = checks[0][-1].device  # the layers of one model may lie on several
            counts = torch.stack([counts.to(device) for *_, counts in checks]).tolist()
            for (where, spec, tokens, _), wrong in zip(checks, counts, strict=True):
                proof.raise_if_wrong(wrong, tokens, spec, where)
        return found

    def remarks(self) -> list[Remark]:
        """What was promised and did not run, and blocks whose calls each saw a part of the tokens."""
        called = set(self.blocks())
        silent = [
            name for name, spec in self.plan.blocks().items() if name not in called and spec.calls is not None
        ]
        found = []
        if silent:
            found.append(Remark("not_called", "warn", not_called(silent, len(self.plan.blocks()))))
        bare = [visit.block for visit in self.visits if not visit.router and self.plan.parts_of(visit.block)]
        if bare:
            names = shortened(list(dict.fromkeys(bare)))
            text = f"the routers of {len(bare)} visits were not called, or their hooks did not run: {names}."
            found.append(Remark("not_called", "warn", f"{text} These visits have no row of a router."))
        if parts := list(self._traits()):
            text = (
                f"each call of {shortened(parts)} sees a part of the forward's tokens: passes are not compared with "
                "each other. Where they do see the same tokens, give the blocks `tokens: same`."
            )
            found.append(Remark("chunks", "info", text))
        return found

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
        self.beside.clear()
        self.expert_rows.clear()

    def _forget(self, boundary: Boundary) -> None:
        self.pending.pop(boundary.block, None)
        self.expert_rows.pop(boundary.block, None)

    def _rows_of(self, visit: _Visit) -> list[int] | None:
        experts = self.plan.experts_of(visit.block)
        return [visit.expert_rows.get(name, 0) for name in experts] if experts else None

    def _join_beside(self) -> None:
        """Give each visit what the routers beside its block handed over: the first call to the first, and so on."""
        for name, calls in self.beside.items():
            block = self.plan[name].block
            visits = [visit for visit in self.visits if visit.block == block]
            if len(visits) != len(calls):
                raise ReconcileError(
                    f"{name} was called {len(calls)} times, its block {block!r} {len(visits)} times; expected one call "
                    "for each visit. Name the block whose state this router routes."
                )
            for visit, taken in zip(visits, calls, strict=True):
                visit.router |= taken
        self.beside.clear()

    def _traits(self) -> dict[str, tuple[str, ...]]:
        """Block → ("chunks",) where each of its calls saw a part of the tokens."""
        tokens: dict[str, list[int]] = {}
        for visit in self.visits:
            tokens.setdefault(visit.block, []).append(prod(visit.residual.shape[:-1]))
        told = {name: self.plan[name].tokens for name in tokens}
        return {
            name: ("chunks",)
            for name, calls in tokens.items()
            if told[name] == "chunks" or (told[name] is None and in_chunks(calls, self.tokens_given))
        }


def not_called(silent: Sequence[str], blocks: int) -> str:
    """Said of blocks that a forward did not call."""
    return (
        f"{len(silent)} of {blocks} captured modules were not called, or their hooks did not run: {shortened(silent)}. "
        "A compiled graph runs no hook that came after it: compile blocks with `block.compile()`, or the model with "
        "`torch.compile(model)`, and attach to what you call. Where a block is optional, give it `calls: null`."
    )
