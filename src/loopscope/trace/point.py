"""TracePoint and its companions: what a model hands over, one record per visit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loopscope.errors import TraceError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

Block = Literal["head", "loop", "tail"]
ScoreFunc = Literal["softmax", "sigmoid", "sqrtsoftplus"]

ROUTER_LOGITS_ARE_PRESOFTMAX = True
"""`TracePoint.router_logits` are raw router outputs; nothing was normalised."""

LOOP_AXIS_PROVENANCE = "hook_call_index"
"""The loop index was counted by the loop itself, never recovered by reshaping a flat layer axis."""

ACCEPTED_LOOP_AXIS_PROVENANCES = (LOOP_AXIS_PROVENANCE, LOOP_AXIS_PROVENANCE + "+external")
"""The two spellings that downstream diagnostics accept; a collector refuses any other."""

ROUTER_FIELDS = ("router_logits", "router_probs", "topk_idx", "topk_weights")
"""The four tensors that a dense visit sets to None together."""

TENSOR_FIELDS = (*ROUTER_FIELDS, "residual", "selection_scores", "expert_bias", "dropped")
"""Every field of a TracePoint that can hold a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class TracePoint:
    """One visit: one execution of one MoE (or dense) layer, as raw detached tensors.

    The tensors are detached **views of live activations**, not copies. A collector must reduce what it needs
    and keep none of them (see `loopscope.trace.watch_trace`).

    B = batch, S = sequence, E = experts of this layer, k = experts chosen per token, d = model width.
    A dense visit sets the four router tensors to None together, with ``num_experts = top_k = 0``.
    """

    block: Block
    """Part of the network: "head", "loop" or "tail"."""
    unrolled_pos: int
    """0-based depth in the unrolled network; the only unique key."""
    loop_step: int
    """Pass through the stack, [0, R); 0 outside the loop."""
    layer_idx: int
    """Physical layer in the stack, [0, L); 0 outside the loop."""
    num_experts: int
    """E of this layer, from the router tensor's own shape."""
    top_k: int
    """k of this layer, from the selection tensor's own shape."""
    router_logits: Float[Tensor, "B S E"] | None
    """Raw router output, before softmax (before the sigmoid for a sigmoid router)."""
    router_probs: Float[Tensor, "B S E"] | None
    """Softmax over all E, not renormalised over the top k (sigmoid router: s/Σ_E s)."""
    topk_idx: Int[Tensor, "B S k"] | None
    """The experts really used; −1 for none, where a trait says that a token may have fewer than k."""
    topk_weights: Float[Tensor, "B S k"] | None
    """Combine weights, renormalised to sum to 1; all 0 for a token without an expert."""
    residual: Float[Tensor, "B S d"]
    """The block's output, nothing applied."""
    score_func: ScoreFunc = "softmax"
    """How scores come from logits."""
    selection_scores: Float[Tensor, "B S E"] | None = None
    """The scores that decided the choice, where a bias was added or groups limit it."""
    expert_bias: Float[Tensor, " E"] | None = None
    """The bias that was added to the scores, one per expert."""
    dropped: Int[Tensor, "B S"] | None = None
    """Assignments of each token that were asked for and did not run, where a capacity drops any."""
    traits: tuple[str, ...] = ()
    """What is unusual about the routing or the tokens, of `loopscope.catalog.traits`; columns that mean nothing under a
    trait are null."""

    @property
    def is_dense(self) -> bool:
        """True for a visit of a layer without a router."""
        return self.router_logits is None

    def tensors(self) -> dict[str, Tensor]:
        """Field name → tensor, for the fields that hold one. A new dict each call; holds the tensors."""
        return {name: value for name in TENSOR_FIELDS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossComponents:
    """The loss of one optimizer step, taken apart; all plain floats, all in nats where they are losses."""

    task_loss: float
    """Cross-entropy before any auxiliary term."""
    lb_loss: float
    """Switch load-balancing loss, E·Σ f_i·p_i: equal-weight mean over visits (microbatches, ranks)."""
    lb_loss_factor: float
    """Factor of lb_loss in the total; logged every step, since it can change during a run."""
    z_loss: float
    """Router z-loss, mean (logsumexp logits)²: equal-weight mean over visits (microbatches, ranks)."""
    z_loss_factor: float
    """Factor of z_loss in the total."""
    total_loss: float
    """What backward ran on, its scaling undone: task + lb_factor·lb + z_factor·z."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceMeta:
    """What a collector must know about one traced step beside its points."""

    num_stacks: int
    """R of this step; it may vary by step where a model samples its depth."""
    num_layers_in_stack: int
    """L, the physical layers of the shared stack."""
    num_experts: int
    """E of the loop's layers. Rows never read it: E comes from each visit's own tensors."""
    num_active: int
    """k of the loop's layers. Rows never read it."""
    router_logits_are_presoftmax: bool = ROUTER_LOGITS_ARE_PRESOFTMAX
    """Always True: probabilities handed in as logits are refused."""
    loop_axis_provenance: str = LOOP_AXIS_PROVENANCE
    """How the loop index was obtained; see `ACCEPTED_LOOP_AXIS_PROVENANCES`."""

    def check(self) -> None:
        """Raise TraceError unless this meta fulfils the contract (provenance, pre-softmax, R and L >= 1)."""
        if self.loop_axis_provenance not in ACCEPTED_LOOP_AXIS_PROVENANCES:
            accepted = " or ".join(repr(name) for name in ACCEPTED_LOOP_AXIS_PROVENANCES)
            raise TraceError(
                f"TraceMeta.loop_axis_provenance is {self.loop_axis_provenance!r}, expected {accepted}. It "
                "states that the loop itself counted loop_step; a loop index recovered by reshaping a flat "
                "layer axis cannot be trusted. Count in the loop and use LOOP_AXIS_PROVENANCE."
            )
        if self.router_logits_are_presoftmax is not True:
            raise TraceError(
                f"TraceMeta.router_logits_are_presoftmax is {self.router_logits_are_presoftmax!r}, expected "
                "True. Record the router's raw output, before softmax or sigmoid."
            )
        if self.num_stacks < 1 or self.num_layers_in_stack < 1:
            raise TraceError(
                f"TraceMeta has num_stacks={self.num_stacks}, "
                f"num_layers_in_stack={self.num_layers_in_stack}, "
                "expected both >= 1. num_stacks is R and num_layers_in_stack is L of the step being traced."
            )


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class VisitSpec:
    """A visit that a model's configuration promises: coverage checks and buffer layouts come from these."""

    unrolled_pos: int
    """0-based depth in the unrolled network."""
    block: Block
    """Part of the network."""
    loop_step: int
    """Pass through the stack; 0 outside the loop."""
    layer_idx: int
    """Physical layer in the stack; 0 outside the loop."""
    num_experts: int
    """E of this layer; 0 where it is dense."""
    top_k: int
    """k of this layer; 0 where it is dense."""


def unrolled_position(loop_step: int, layer_idx: int, num_layers_in_stack: int) -> int:
    """Depth within the loop block: ``loop_step * num_layers_in_stack + layer_idx``.

    THE definition of this arithmetic. A network with a head adds the head's depth.

    >>> unrolled_position(2, 1, num_layers_in_stack=4)
    9

    Raises:
        ValueError: the stack size is < 1, or an index is out of range.
    """
    if num_layers_in_stack < 1:
        raise ValueError(f"num_layers_in_stack is {num_layers_in_stack}, expected >= 1")
    if loop_step < 0:
        raise ValueError(f"loop_step is {loop_step}, expected >= 0")
    if not 0 <= layer_idx < num_layers_in_stack:
        raise ValueError(
            f"layer_idx is {layer_idx}, expected 0 <= layer_idx < num_layers_in_stack={num_layers_in_stack}; "
            "layer_idx counts physical layers within the stack, not unrolled depth"
        )
    return loop_step * num_layers_in_stack + layer_idx
