"""What the model would say after each pass through the loop: loss, change and settling of its predictions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReadoutSums:
    """Sums over one document's positions, float64 scalars on the device of the logits."""

    loss: Tensor
    """Σ cross-entropy in nats over the S − 1 positions that have a target."""
    entropy: Tensor
    """Σ H(q) in nats over the S positions."""
    kl: Tensor | None
    """Σ KL(q_before ‖ q) in nats over the S positions; None without a step before."""


def readout_sums(
    logits_SV: Float[Tensor, "S V"], before_SV: Float[Tensor, "S V"] | None, ids_S: Int[Tensor, " S"]
) -> ReadoutSums:
    """Sums of one document's readout at one loop step, in float32 per token whatever the logits' type.

    Args:
        logits_SV: logits read out after this loop step; q = softmax.
        before_SV: those after the loop step before; None at the first.
        ids_S: the document's tokens; position s predicts ids[s + 1].
    """
    log_q = F.log_softmax(logits_SV.float(), dim=-1)
    loss = F.nll_loss(log_q[:-1], ids_S[1:].long(), reduction="none")
    entropy = -(log_q.exp() * log_q).sum(-1)
    kl = None
    if before_SV is not None:
        log_p = F.log_softmax(before_SV.float(), dim=-1)
        # Rounding can leave a tiny negative number where the two are all but equal; a divergence has none.
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).double().sum()
    return ReadoutSums(loss.double().sum(), entropy.double().sum(), kl)


def settled(argmax_RN: Int[Tensor, "R N"]) -> Bool[Tensor, "R N"]:
    """Per loop step and token, whether its arg-max equals that of every later step.

    The last row is vacuously true.

    >>> settled(torch.tensor([[4, 1], [4, 2], [4, 1]])).tolist()
    [[True, False], [True, False], [True, True]]
    """
    same_RN = argmax_RN == argmax_RN[-1:]
    # Equal to every later step means: from here on nothing differs from the last.
    return same_RN.flip(0).long().cumprod(0).bool().flip(0)


class Settling:
    """`settled`, counted while the loop steps come one after the other; it keeps two numbers per token.

    Args:
        num_tokens: N.
        device: of the arg-max values.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._steps = 0
        self._argmax_N = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
        self._since_N = torch.zeros(num_tokens, dtype=torch.int64, device=device)

    def add(self, argmax_N: Int[Tensor, " N"]) -> None:
        """The tokens' arg-max after the next loop step."""
        self._since_N.masked_fill_(argmax_N != self._argmax_N, self._steps)
        self._argmax_N = argmax_N
        self._steps += 1

    def counts(self) -> list[int]:
        """Per loop step, tokens whose arg-max equals that of every later step."""
        began_R = torch.bincount(self._since_N, minlength=self._steps)
        return [int(count) for count in began_R.cumsum(0)]
