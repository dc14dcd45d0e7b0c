"""Which experts a token is with, from whatever a router hands over, as [N, k] indices and weights."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from loopscope.capture.errors import ReconcileError
from loopscope.capture.routing import RoutingSpec
from loopscope.capture.scores import Routing, scores_of


def routing_of_call(
    router: Mapping[str, Tensor], spec: RoutingSpec, shape: tuple[int, int], where: str
) -> Routing:
    """The router tensors of one call, flattened to the N = B·S tokens of the block.

    Args:
        router: tensor name → tensor, of `loopscope.capture.spec.TENSORS`.
        spec: how the router chooses.
        shape: B and S of the block's output.
        where: names the visit in messages.

    Raises:
        ReconcileError: a tensor is missing, or fits neither the experts nor the tokens.
    """
    tokens = shape[0] * shape[1]
    if (given := router.get("router_logits")) is None:
        raise ReconcileError(f"{where}: router_logits were not handed over in this call.")
    bias = router.get("expert_bias")
    if bias is not None and bias.numel() == spec.width:
        bias = bias.reshape(-1).to(given.device)
    if spec.choice == "soft":
        return _soft(router, given, spec, tokens, where)
    logits = _flat(given)
    probs = None if (found := router.get("router_probs")) is None else _flat(found)
    raw = Routing(
        logits, logits, _per_choice(router, "topk_weights", tokens, spec), bias, probs, sequence=shape[1]
    )
    idx = _per_choice(router, "topk_idx", tokens, spec)
    if logits.shape[0] != tokens:
        raise ReconcileError(
            f"{where}: the router saw {logits.shape[0]} tokens, the block's output has {tuple(shape)} = "
            f"{tokens}. Sequences must not be sharded or packed between the two."
        )
    runs, gates = _over_experts(router, spec, shape, where)
    if runs is None:
        if idx is None:
            raise ReconcileError(f"{where}: topk_idx was not handed over in this call.")
        kept = _per_choice(router, "kept", tokens, spec)
        return replace(raw, idx=idx, ran=None if kept is None else kept != 0)
    return _from_masks(raw, idx, runs, gates, spec, where)


def _from_masks(
    raw: Routing, idx: Tensor | None, runs: Tensor, gates: Tensor | None, spec: RoutingSpec, where: str
) -> Routing:
    if spec.choice == "expert_choice":
        every = torch.arange(spec.width, device=runs.device)
        return replace(raw, idx=torch.where(runs, every, -1), weights=gates)
    if idx is None:
        found = runs.to(torch.int32).topk(spec.top_k, dim=-1)
        chosen = torch.where(found.values > 0, found.indices, -1)
        raw = replace(raw, idx=chosen, extra=runs.sum(dim=-1) > spec.top_k)
        if not spec.open_choice:
            raw = replace(raw, extra=runs.sum(dim=-1) != spec.top_k)
    else:
        if tuple(idx.shape) != (runs.shape[0], spec.top_k):
            raise ReconcileError(
                f"{where}: topk_idx is {tuple(idx.shape)}, expected ({runs.shape[0]}, {spec.top_k})."
            )
        raw = replace(raw, idx=idx)
        safe, real = raw.chosen(spec)
        ran = runs.gather(-1, safe) & real
        raw = replace(raw, ran=ran, extra=runs.sum(dim=-1) != ran.sum(dim=-1))
    if gates is None:
        return raw
    safe, real = raw.chosen(spec)
    return replace(raw, weights=torch.where(real, gates.gather(-1, safe), 0.0))


def _over_experts(
    router: Mapping[str, Tensor], spec: RoutingSpec, shape: tuple[int, int], where: str
) -> tuple[Tensor | None, Tensor | None]:
    """[N, W] bool, where a token runs; [N, W], its combine weights."""
    tokens = shape[0] * shape[1]
    dispatch, combine = router.get("dispatch"), router.get("combine")
    if (chosen := router.get("token_idx")) is not None:
        return _chosen_tokens(chosen, router.get("token_weights"), spec, shape, where)
    gates = None
    if combine is not None:
        gates = _slots(combine, "combine", tokens, spec, where).sum(dim=-1)
    if dispatch is not None:
        return (_slots(dispatch, "dispatch", tokens, spec, where) != 0).any(dim=-1), gates
    return (None, None) if gates is None else (gates != 0, gates)


def _slots(tensor: Tensor, name: str, tokens: int, spec: RoutingSpec, where: str) -> Tensor:
    """[N, W, C], C = 1 where the tensor has no slots."""
    for tail in (1, 2):
        if (
            tensor.ndim > tail
            and tensor.shape[-tail] == spec.width
            and tensor.shape[:-tail].numel() == tokens
        ):
            return tensor.reshape(tokens, spec.width, -1 if tokens else 1)
    raise ReconcileError(
        f"{where}: {name} is {tuple(tensor.shape)}, expected [tokens, experts] or [tokens, experts, capacity] with "
        f"{tokens} tokens (or batch and sequence) and {spec.width} experts. Name the tensor of this shape, or register "
        "a decoder that makes it."
    )


def _chosen_tokens(
    chosen: Tensor, weights: Tensor | None, spec: RoutingSpec, shape: tuple[int, int], where: str
) -> tuple[Tensor, Tensor | None]:
    """Masks of the tokens that experts chose: of the batch, or of each sequence."""
    batch, seq = shape
    one_batch = chosen.ndim == 2 and chosen.shape[0] == spec.width
    by_sequence = chosen.ndim == 3 and tuple(chosen.shape[:2]) == (batch, spec.width)
    if not (one_batch or by_sequence) or chosen.is_floating_point():
        raise ReconcileError(
            f"{where}: token_idx is {chosen.dtype} {tuple(chosen.shape)}, expected integers [{spec.width}, capacity], "
            f"or [{batch}, {spec.width}, capacity] within each sequence."
        )
    if weights is not None and weights.shape != chosen.shape:
        raise ReconcileError(
            f"{where}: token_weights is {tuple(weights.shape)}, expected the shape of token_idx, {tuple(chosen.shape)}."
        )
    groups, length = (batch, seq) if by_sequence else (1, batch * seq)
    flat = chosen.long().reshape(groups, spec.width, -1)
    inside = (flat >= 0) & (flat < length)
    safe = flat.clamp(0, max(length - 1, 0))
    times = torch.zeros(groups, spec.width, length, dtype=torch.int64, device=chosen.device)
    runs = times.scatter_add(2, safe, inside.long()).transpose(1, 2).reshape(batch * seq, spec.width) > 0
    if weights is None:
        return runs, None
    gates = torch.zeros(times.shape, dtype=weights.dtype, device=chosen.device)
    given = torch.where(inside, weights.reshape(flat.shape), 0.0)
    return runs, gates.scatter_add(2, safe, given).transpose(1, 2).reshape(batch * seq, spec.width)


def _soft(
    router: Mapping[str, Tensor], logits: Tensor, spec: RoutingSpec, tokens: int, where: str
) -> Routing:
    """Every token with every expert: an expert's logit is the logsumexp over its slots, so that a softmax over experts
    gives the share of its slots."""
    if logits.numel() % max(1, tokens * spec.width) or not logits.is_floating_point():
        raise ReconcileError(
            f"{where}: router_logits is {logits.dtype} {tuple(logits.shape)}, expected floats [tokens, experts] or "
            f"[tokens, experts, slots] with {tokens} tokens and {spec.width} experts."
        )
    slots = logits.reshape(tokens, spec.width, -1 if tokens else 1)
    wide = slots[..., 0] if slots.shape[-1] == 1 else slots.float().logsumexp(dim=-1)
    idx = torch.arange(spec.width, device=logits.device).expand(tokens, spec.width)
    combine = router.get("combine")
    if combine is None:
        return Routing(wide, idx, scores_of(wide, spec))
    return Routing(wide, idx, _slots(combine, "combine", tokens, spec, where).sum(dim=-1))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _per_choice(router: Mapping[str, Tensor], name: str, tokens: int, spec: RoutingSpec) -> Tensor | None:
    """[N, k]; an arg-max may lack the last dimension where k is 1."""
    if (tensor := router.get(name)) is None:
        return None
    if spec.top_k == 1 and tensor.numel() == tokens:
        return tensor.reshape(tokens, 1)
    return _flat(tensor) if tensor.ndim else tensor.reshape(1, 1)
