"""Per-token cross-entropy of a probe, and the check that the model's output is logits over the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loopscope.errors import ProbeError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_HEADS = ("lm_head", "output", "unembed")
_EMBEDDINGS = ("tok_embeddings", "embed_tokens", "wte", "embedding", "embed")


def per_token_loss(logits_BSV: Float[Tensor, "B S V"], ids_BS: Int[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    """Cross-entropy in nats of each position's prediction of the next token; float32, last position 0.

    Position s holds -log softmax(logits[b, s])[ids[b, s + 1]]. Computed in float32 whatever the logits'
    type, one document at a time, so that the float32 copy is one document's.
    """
    loss_BS = torch.zeros(ids_BS.shape, dtype=torch.float32, device=logits_BSV.device)
    for row, (logits_SV, ids_S) in enumerate(zip(logits_BSV, ids_BS, strict=True)):
        loss_BS[row, :-1] = F.cross_entropy(
            logits_SV[:-1].float(), ids_S[1:].to(logits_SV.device).long(), reduction="none"
        )
    return loss_BS


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: the tensor itself, a tuple's first element, or its `logits` attribute.

    Raises:
        ProbeError: none of the three.
    """
    found = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ProbeError(
            f"the model returned {type(output).__name__}, expected logits [B, S, V] or a tuple that starts "
            "with them. Wrap the model in a module whose forward(input_ids) returns its logits."
        )
    # A global tensor spread over ranks: gathering it is a collective that every rank reaches.
    gather = getattr(found, "full_tensor", None)
    return found if gather is None else gather()


def check_logits(logits: Tensor, ids_BS: Tensor, vocabulary: frozenset[int], width: int | None) -> None:
    """Raise ProbeError unless `logits` is [B, S, vocabulary].

    Args:
        logits: the model's output.
        ids_BS: the tokens it was computed from.
        vocabulary: sizes that the model itself names, from `vocabulary_sizes`; may be empty.
        width: the model's width d as recorded residuals show it, to tell hidden states where the model
            names no vocabulary.
    """
    hint = (
        "Return logits from the forward; a model whose loss applies the head must do so itself in a probe "
        "(`_skip_lm_head` is switched off where it exists)."
    )
    if logits.ndim != 3 or logits.shape[:2] != ids_BS.shape:
        raise ProbeError(
            f"the model returned a tensor {list(logits.shape)}, expected [B, S, V] with "
            f"[B, S] = {list(ids_BS.shape)}. {hint}"
        )
    size = logits.shape[-1]
    if vocabulary and size not in vocabulary:
        expected = " or ".join(str(known) for known in sorted(vocabulary))
        what = ", which is the width of its residual: these are hidden states" if size == width else ""
        raise ProbeError(
            f"the last dimension of the model's output is {size}{what}; expected the vocabulary, {expected}. "
            f"{hint}"
        )
    if not vocabulary and size == width:
        raise ProbeError(
            f"the last dimension of the model's output is {size}, the width of its residual, and the model "
            f"names no vocabulary: expected logits, these look like hidden states. {hint} If they are "
            "logits, give the model an attribute `vocab_size`."
        )


def check_ids(ids_BS: Tensor, vocabulary: frozenset[int]) -> None:
    """Raise ProbeError unless `ids_BS` is a non-empty [B, S >= 2] of token ids that the vocabulary holds."""
    if ids_BS.ndim != 2 or ids_BS.shape[0] < 1 or ids_BS.shape[1] < 2:
        raise ProbeError(
            f"input_ids has shape {list(ids_BS.shape)}, expected [B, S] with B >= 1 and S >= 2: the loss at "
            "a position needs the next token."
        )
    if ids_BS.is_floating_point() or ids_BS.is_complex() or ids_BS.dtype == torch.bool:
        raise ProbeError(f"input_ids has dtype {ids_BS.dtype}, expected integer token ids.")
    low, high = (int(value) for value in torch.aminmax(ids_BS))
    if low < 0 or (vocabulary and high >= max(vocabulary)):
        raise ProbeError(
            f"input_ids holds ids from {low} to {high}, expected 0 <= id < "
            f"{max(vocabulary, default='vocabulary')}. "
            "The corpus was tokenised for another vocabulary; build it with this model's tokenizer."
        )


def vocabulary_sizes(model: nn.Module) -> frozenset[int]:
    """The vocabulary sizes that `model` names; several where its head is padded, none where it names none.

    Read from `vocab_size` (its own, or its config's), from the weight of a top-level module called as
    output heads are, and from its token embedding (any embedding, where none bears a usual name).
    """
    sizes = {
        getattr(source, "vocab_size", None)
        for source in (model, getattr(model, "config", None), getattr(model, "args", None))
    }
    named: set[int] = set()
    others: set[int] = set()
    for path, module in model.named_modules():
        name = path.removeprefix("_orig_mod.").removeprefix("module.")
        if isinstance(module, nn.Linear) and name.removeprefix("model.") in _HEADS:
            sizes.add(int(module.weight.shape[0]))
        elif isinstance(module, nn.Embedding):
            group = named if name.rpartition(".")[2] in _EMBEDDINGS else others
            group.add(int(module.weight.shape[0]))
    sizes |= named or others
    return frozenset(size for size in sizes if isinstance(size, int) and size > 0)
