"""What the metrics take: raw tensors of one visit or of two, and the checks that need no sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loopscope.catalog.traits import TRAITS
from loopscope.errors import MetricInputError

if TYPE_CHECKING:
    # Not at run time: `check_visit` and `check_pair` judge what callers hand over, with messages of their own.
    from jaxtyping import Bool, Float, Int

ROUTER_FIELDS = ("router_logits", "router_probs", "topk_idx", "topk_weights")
SCORE_FUNCS = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True, slots=True, eq=False)
class VisitTensors:
    """Raw tensors of one visit; B batch, S sequence, E experts, k chosen, d width. Dense: no router."""

    router_logits: Float[Tensor, "B S E"] | None
    """Before softmax (before the sigmoid for a sigmoid router)."""
    router_probs: Float[Tensor, "B S E"] | None
    """Over all E, not renormalised over the chosen."""
    topk_idx: Int[Tensor, "B S k"] | None
    """The experts really used; −1 for none, where a trait allows it."""
    topk_weights: Float[Tensor, "B S k"] | None
    """Combine weights, sum 1; all 0 for a token without an expert."""
    residual: Float[Tensor, "B S d"]
    """The block's output."""
    score_func: str = "softmax"
    """How scores come from logits; one of `SCORE_FUNCS`."""
    selection_scores: Float[Tensor, "B S E"] | None = None
    """Scores that decided the choice, where they are not the logits."""
    expert_bias: Float[Tensor, " E"] | None = None
    """Bias that was added to the scores."""
    dropped: Int[Tensor, "B S"] | None = None
    """Assignments of each token that were asked for and did not run."""
    traits: tuple[str, ...] = ()
    """What is unusual, of `loopscope.catalog.traits`."""

    @property
    def is_dense(self) -> bool:
        """True where the layer has no router."""
        return self.router_logits is None

    @property
    def score_space(self) -> str:
        """Which scores margins and gaps are taken from: "selection_scores" or "logits"."""
        return "logits" if self.selection_scores is None else "selection_scores"


@dataclass(frozen=True, slots=True, eq=False)
class PairTensors:
    """Raw tensors of two visits h_from → h_to at the same site (both block outputs)."""

    from_residual: Float[Tensor, "B S d"]
    to_residual: Float[Tensor, "B S d"]
    before_residual: Float[Tensor, "B S d"] | None = None
    """h of the loop step before `from` at the same layer: only for `step_boundary`, None for the first."""
    from_topk_idx: Int[Tensor, "B S k"] | None = None
    """Chosen experts of the first visit; read only where both visits are of the same physical layer."""
    to_topk_idx: Int[Tensor, "B S k"] | None = None
    """Chosen experts of the second visit."""
    traits: tuple[str, ...] = ()
    """What is unusual about either visit, of `loopscope.catalog.traits`."""

    @property
    def residual(self) -> Float[Tensor, "B S d"]:
        """The output that the pair leads to."""
        return self.to_residual


def check_visit(
    tensors: VisitTensors, valid: Bool[Tensor, "B S"] | None, num_experts: int, top_k: int
) -> None:
    """Check shapes, types, E and k of one visit without reading a value from the device.

    Args:
        tensors: the visit.
        valid: [B, S] bool, True for tokens that count; None for all.
        num_experts: E the row will claim; 0 for a dense visit.
        top_k: k the row will claim; 0 for a dense visit.

    Raises:
        MetricInputError: names the tensor, what was got, what was expected and the fix.
    """
    residual = tensors.residual
    if residual.ndim != 3 or residual.numel() == 0:
        raise MetricInputError(
            f"residual has shape {tuple(residual.shape)}, expected [B, S, d] with at least one token. "
            "Record the block's output with its batch and sequence dimensions."
        )
    _check_float("residual", residual)
    batch, seq = residual.shape[:2]
    _check_valid(valid, batch, seq)
    _check_traits(tensors.traits)
    if tensors.dropped is not None and tuple(tensors.dropped.shape) != (batch, seq):
        raise MetricInputError(
            f"dropped has shape {tuple(tensors.dropped.shape)}, expected {(batch, seq)}: assignments of each token."
        )
    given = [name for name in ROUTER_FIELDS if getattr(tensors, name) is not None]
    if not given:
        if num_experts or top_k:
            raise MetricInputError(
                f"num_experts={num_experts} and top_k={top_k} without router tensors, expected 0 and 0. "
                "A dense visit sets the four router tensors to None and both numbers to 0."
            )
        return
    if len(given) < len(ROUTER_FIELDS):
        raise MetricInputError(
            f"only {', '.join(given)} given, expected {', '.join(ROUTER_FIELDS)} together or none of them. "
            "Record all four, or set all four to None for a dense visit."
        )
    if tensors.score_func not in SCORE_FUNCS:
        raise MetricInputError(
            f"score_func is {tensors.score_func!r}, expected one of {', '.join(SCORE_FUNCS)}."
        )
    if not 1 <= top_k <= num_experts:
        raise MetricInputError(
            f"top_k={top_k} and num_experts={num_experts}, expected 1 <= top_k <= num_experts. "
            "Take both from this layer's own tensors."
        )
    for name, last, what in (
        ("router_logits", num_experts, "num_experts"),
        ("router_probs", num_experts, "num_experts"),
        ("topk_idx", top_k, "top_k"),
        ("topk_weights", top_k, "top_k"),
        ("selection_scores", num_experts, "num_experts"),
    ):
        tensor = getattr(tensors, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != (batch, seq, last):
            raise MetricInputError(
                f"{name} has shape {tuple(tensor.shape)}, expected {(batch, seq, last)} (residual's B and S, "
                f"{what}={last}). Reshape flattened router outputs to [B, S, ...] before recording, and take "
                "num_experts and top_k from this layer's own tensors."
            )
        if name != "topk_idx":
            _check_float(name, tensor)
        elif tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
            raise MetricInputError(
                f"topk_idx is {tensor.dtype}, expected an integer type. Record expert indices."
            )
    if (bias := tensors.expert_bias) is not None:
        if tuple(bias.shape) != (num_experts,):
            raise MetricInputError(
                f"expert_bias has shape {tuple(bias.shape)}, expected ({num_experts},): one number an expert."
            )
        _check_float("expert_bias", bias)


def check_pair(tensors: PairTensors, valid: Bool[Tensor, "B S"] | None) -> None:
    """Check that both sides of a transition have one shape.

    Raises:
        MetricInputError: names the tensor, what was got and what was expected.
    """
    shape = tuple(tensors.to_residual.shape)
    for name in ("from_residual", "before_residual"):
        other = getattr(tensors, name)
        if other is not None and tuple(other.shape) != shape:
            raise MetricInputError(
                f"{name} has shape {tuple(other.shape)}, expected {shape} like to_residual. "
                "A transition compares two block outputs of one width; do not plan it between others."
            )
    _check_traits(tensors.traits)
    _check_valid(valid, shape[0], shape[1])


def _check_traits(traits: tuple[str, ...]) -> None:
    if unknown := [name for name in traits if name not in TRAITS]:
        raise MetricInputError(f"traits name {unknown}, expected any of {', '.join(TRAITS)}.")


def _check_float(name: str, tensor: Tensor) -> None:
    if not tensor.dtype.is_floating_point:
        raise MetricInputError(f"{name} is {tensor.dtype}, expected a floating-point type.")
    if tensor.requires_grad:
        raise MetricInputError(f"{name} requires grad, expected a detached tensor. Record `{name}.detach()`.")


def _check_valid(valid: Tensor | None, batch: int, seq: int) -> None:
    if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != (batch, seq)):
        raise MetricInputError(
            f"valid is {valid.dtype} of shape {tuple(valid.shape)}, expected torch.bool of shape "
            f"{(batch, seq)}: True for every input token that is not padding."
        )
