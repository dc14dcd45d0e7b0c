"""`CaptureSpec`: what is taken at one module boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loopscope.capture.errors import PlanError
from loopscope.capture.frozen import FrozenMapping
from loopscope.capture.nearest import suggestion
from loopscope.capture.reducers import BoundReducer
from loopscope.capture.routing import RoutingSpec
from loopscope.capture.source import Source, parse_source

ASSIGNMENTS = ("topk_idx", "dispatch", "combine", "token_idx")
"""What tells which experts a token is with; one of them is needed, except where routing is soft."""
TENSORS = (
    "router_logits",
    "router_probs",
    *ASSIGNMENTS,
    "topk_weights",
    "token_weights",
    "kept",
    "expert_bias",
    "expert_input",
    "residual",
)
"""What can be captured at a boundary; N tokens (or [B, S]), E experts, k chosen, C capacity.

`router_logits` [N, E]; `router_probs` [N, E] and `topk_weights` [N, k] may be left out: they follow from the others.
`topk_idx` [N, k], the experts chosen. `dispatch` [N, E] or [N, E, C], not 0 where a token runs in an expert; `combine`,
the same with combine weights. `token_idx` [E, C], or [B, E, C] within each sequence: the tokens that experts chose, and
`token_weights` of the same shape. `kept` [N, k], not 0 where a choice ran. `expert_bias` [E]. `expert_input` at the
module of one expert: what it was called with. `residual` [B, S, d], the block's output.
"""
ROUTER_TENSORS = TENSORS[:-1]
MESH_AXES = ("dp", "dp_replicate", "dp_shard", "tp", "ep", "cp", "pp")
PLACEMENTS = ("local", "replicated", "sequence-sharded")
MERGES = ("sum", "none")
TOKENS = ("same", "chunks")
"""What the calls of a looped block see in one forward: all tokens in each pass, or each a part of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """One boundary: what is captured there, where each tensor comes from, and how it merges."""

    tensors: Mapping[str, str]
    """Tensor name → source (see `loopscope.capture.source`). A boundary with `residual` is a visit's block."""
    placements: Mapping[str, str] = field(default_factory=dict)
    """Mesh axis → placement of the captured tensors; an axis that is not named is "local"."""
    merge: str = "sum"
    """"sum": partial sums add up over microbatches and ranks; "none": the boundary gives no rows."""
    routing: RoutingSpec | None = None
    """Needed wherever a router tensor is captured."""
    layer: int | None = None
    """Physical number of the layer, for boundaries that give a visit; None counts them in order."""
    calls: int | None = 1
    """Calls in one forward, where promised; None where the depth is not fixed."""
    block: str | None = None
    """The block whose visits a router outside it belongs to, called once for each; None: the innermost around it."""
    tokens: str | None = None
    """"same" or "chunks"; None: judged from the shapes of the forward."""
    reducers: tuple[BoundReducer, ...] = ()
    """The user's own metrics."""

    def sources(self, where: str) -> dict[str, Source]:
        """Parsed sources, checked by name."""
        for name in self.tensors:
            if name not in TENSORS:
                raise PlanError(f"{where}: no tensor {name!r} can be captured.{suggestion(name, TENSORS)}")
        return {name: parse_source(text, f"{where}.tensors.{name}") for name, text in self.tensors.items()}

    @property
    def is_block(self) -> bool:
        """True where the boundary gives visits."""
        return "residual" in self.tensors

    def plain(self) -> dict[str, Any]:
        """Plain types, as a plan file holds them."""
        return {
            "tensors": dict(self.tensors),
            "placements": dict(self.placements),
            "merge": self.merge,
            "calls": self.calls,
            **{
                name: value
                for name in ("layer", "block", "tokens")
                if (value := getattr(self, name)) is not None
            },
            **({} if self.routing is None else {"routing": self.routing.plain()}),
        }


class CapturePlan(FrozenMapping[str, CaptureSpec]):
    """Fully qualified module name → CaptureSpec, in the model's own order; immutable."""

    def __init__(
        self,
        boundaries: Mapping[str, CaptureSpec],
        *,
        declared_layers: tuple[int, ...] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(boundaries)
        self.declared_layers = declared_layers
        """Physical numbers of the MoE layers that the model's configuration declares; None: it declares none."""
        self.notes = notes
        """What the adapter left out, and why."""

    def __repr__(self) -> str:
        return f"CapturePlan({list(self)})"

    def replaced(self, boundaries: Mapping[str, CaptureSpec]) -> CapturePlan:
        """The same plan with other boundaries."""
        return CapturePlan(boundaries, declared_layers=self.declared_layers, notes=self.notes)

    def blocks(self) -> dict[str, CaptureSpec]:
        """The boundaries that give visits."""
        return {name: spec for name, spec in self.items() if spec.is_block and spec.merge != "none"}

    def parts_of(self, block: str) -> dict[str, CaptureSpec]:
        """Router boundaries that belong to the visit of `block`: it itself, what lies inside it and in no block of its
        own, and what names it."""
        blocks = self.blocks()
        return {
            name: spec
            for name, spec in self.items()
            if set(spec.tensors) & set(ROUTER_TENSORS) and (spec.block or enclosing(name, blocks)) == block
        }

    def experts_of(self, block: str) -> list[str]:
        """Boundaries of single experts in `block`, by their numbers."""
        return [name for name, part in self.parts_of(block).items() if "expert_input" in part.tensors]

    def routing_of(self, block: str) -> RoutingSpec | None:
        """How the router of `block` chooses; None where it has none."""
        return next(
            (part.routing for part in self.parts_of(block).values() if part.routing is not None), None
        )


def enclosing(name: str, blocks: Mapping[str, Any]) -> str | None:
    """The innermost of `blocks` that is `name` or contains it; None where there is none."""
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return name if name in blocks else None
