"""One traced forward: what the boundaries handed over, in call order, made into TracePoints at its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from loopscope.capture import proof
from loopscope.capture.errors import CoverageError, ReconcileError
from loopscope.capture.nearest import shortened
from loopscope.capture.routing import RoutingSpec
from loopscope.capture.source import Call, Source
from loopscope.capture.spec import CapturePlan
from loopscope.capture.visits import meta_of, plan_visits
from loopscope.trace import TraceMeta, TracePoint, VisitSpec


@dataclass(slots=True)
class _Visit:
    block: str
    residual: Tensor
    router: dict[str, Tensor]


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
        if taken:
            waiting = self.pending.setdefault(boundary.block, {})
            if any(name in waiting for name in taken):
                self.problems.append(
                    f"{boundary.name}: its router ran twice in one call of {boundary.block!r}"
                )
            waiting.update(taken)
        if boundary.is_block and residual is not None:
            self.visits.append(_Visit(boundary.block, residual, self.pending.pop(boundary.block, {})))

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
        checks: list[tuple[str, RoutingSpec, int, Tensor]] = []
        found = [
            self._point(visit, at, checks if verify else None)
            for visit, at in zip(self.visits, self.specs(), strict=True)
        ]
        if checks:
            counts = torch.stack([counts for *_, counts in checks]).tolist()
            for (where, spec, tokens, _), wrong in zip(checks, counts, strict=True):
                proof.raise_if_wrong(wrong, tokens, spec, where)
        return found

    def take(self, value: Any, name: str) -> Any:
        """What is kept of a value that a source named: a tensor without its graph, local to this rank."""
        if isinstance(value, (tuple, list)):
            raise ReconcileError(
                f"{name} is a {type(value).__name__} of {len(value)}, expected a tensor; add [index]"
            )
        if not isinstance(value, torch.Tensor):
            raise ReconcileError(f"{name} is {type(value).__name__}, expected a tensor")
        return (value.to_local() if hasattr(value, "to_local") else value).detach()

    def blocks(self) -> list[str]:
        """The block of each visit so far, in call order."""
        return [visit.block for visit in self.visits]

    def clear(self) -> None:
        """Let go of every tensor."""
        self.visits.clear()
        self.pending.clear()

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

    def _point(self, visit: _Visit, at: VisitSpec, checks: list[Any] | None) -> TracePoint:
        if (residual := visit.residual).ndim != 3:
            raise ReconcileError(
                f"{visit.block}: residual is {tuple(residual.shape)}, expected [B, S, d]. Name the block's output "
                "that has batch and sequence."
            )
        fields = _DENSE
        if visit.router:
            spec = next(
                part.routing for part in self.plan.parts_of(visit.block).values() if part.routing is not None
            )
            where = f"{visit.block} (unrolled_pos {at.unrolled_pos})"
            raw = _flat(visit.router, residual, spec, where)
            if checks is not None:
                checks.append((where, spec, raw.logits.shape[0], proof.wrong_counts(raw, spec)))
            fields = router_fields(raw, spec, residual.shape[:2])
        return TracePoint(
            block=at.block,
            unrolled_pos=at.unrolled_pos,
            loop_step=at.loop_step,
            layer_idx=at.layer_idx,
            residual=residual,
            **fields,
        )


_DENSE: Mapping[str, Any] = MappingProxyType(
    {"num_experts": 0, "top_k": 0}
    | dict.fromkeys(("router_logits", "router_probs", "topk_idx", "topk_weights"))
)


def router_fields(
    raw: proof.Routing, spec: RoutingSpec, shape: torch.Size | tuple[int, int]
) -> dict[str, Any]:
    """The router fields of a TracePoint from one call's tensors: scores over all E summing to 1, weights
    renormalised, selection scores where a bias was added. [N, ...] becomes [B, S, ...]."""
    # The model's own scores where they were handed over, else from the logits.
    scores = raw.probs if raw.probs is not None else proof.scores_of(raw.logits, spec)
    probs = (
        scores / scores.sum(dim=-1, keepdim=True).clamp_min(1e-20) if spec.score_func == "sigmoid" else scores
    )
    weights = raw.weights if raw.weights is not None else proof.expected_weights(raw, spec, scores)
    weights = weights.float()
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return {
        "num_experts": raw.logits.shape[-1],
        "top_k": raw.idx.shape[-1],
        "router_logits": raw.logits.reshape(*shape, -1),
        "router_probs": probs.reshape(*shape, -1),
        "topk_idx": raw.idx.reshape(*shape, -1),
        "topk_weights": weights.reshape(*shape, -1),
        "score_func": spec.score_func,
        "selection_scores": None if raw.bias is None else (scores + raw.bias).reshape(*shape, -1),
        "expert_bias": raw.bias,
    }


def _flat(router: Mapping[str, Tensor], residual: Tensor, spec: RoutingSpec, where: str) -> proof.Routing:
    def flat(name: str) -> Tensor | None:
        tensor = router.get(name)
        return None if tensor is None else tensor.reshape(-1, tensor.shape[-1])

    logits, idx = flat("router_logits"), flat("topk_idx")
    if logits is None or idx is None:
        raise ReconcileError(f"{where}: router_logits or topk_idx was not handed over in this call.")
    raw = proof.Routing(logits, idx, flat("topk_weights"), router.get("expert_bias"), flat("router_probs"))
    proof.check_shapes(raw, spec, where)
    if logits.shape[0] != (tokens := residual.shape[0] * residual.shape[1]):
        raise ReconcileError(
            f"{where}: the router saw {logits.shape[0]} tokens, the block's output has {tuple(residual.shape[:2])} = "
            f"{tokens}. Sequences must not be sharded or packed between the two."
        )
    return raw
