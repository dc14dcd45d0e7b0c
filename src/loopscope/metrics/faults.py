"""What can be wrong with the values of an input, judged on the host from counters in the partial sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loopscope.metrics.partials import Partials

FaultKind = Literal[
    "probabilities_as_logits", "index_out_of_range", "weights_not_normalised", "nonfinite", "metric_failed"
]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with an input. Plain text and numbers, so that it can be kept."""

    kind: FaultKind
    count: int
    """How many entries or tokens."""
    message: str
    """What was got, what was expected, the fix."""
    fatal: bool
    """True where the input broke the contract, so that the numbers of the row cannot be trusted."""


def visit_faults(partials: Partials) -> list[Fault]:
    """Faults of one visit, from its merged counters."""
    faults: list[Fault] = []
    if partials.num_experts:
        tokens = int(partials.tokens)
        like_probs = partials.number("prob_like")
        if partials.num_experts >= 2 and tokens > 0 and like_probs == tokens:
            faults.append(
                Fault(
                    "probabilities_as_logits",
                    tokens,
                    f"router_logits hold probabilities: every one of {tokens} rows lies in [0, 1] and sums "
                    "to 1; expected raw router outputs. Record the logits before the softmax (or sigmoid).",
                    fatal=True,
                )
            )
        bad_index = int(partials.number("bad_index"))
        if bad_index:
            faults.append(
                Fault(
                    "index_out_of_range",
                    bad_index,
                    f"topk_idx has {bad_index} entries outside [0, {partials.num_experts}), expected expert "
                    "indices of this layer. Check that num_experts is this layer's own, and that indices are "
                    "not global.",
                    fatal=True,
                )
            )
        bad_weights = int(partials.number("bad_weights"))
        if bad_weights:
            faults.append(
                Fault(
                    "weights_not_normalised",
                    bad_weights,
                    f"topk_weights of {bad_weights} of {tokens} tokens do not sum to 1; expected combine "
                    "weights renormalised over the chosen experts. Record them after renormalisation, before "
                    "any scaling.",
                    fatal=False,
                )
            )
    for name in ("router_logits", "router_probs", "topk_weights", "choice_scores", "residual"):
        count = partials.nonfinite(name)
        if count:
            faults.append(
                Fault(
                    "nonfinite", count, f"{name} has {count} non-finite entries in valid tokens.", fatal=False
                )
            )
    return faults


def pair_faults(partials: Partials) -> list[Fault]:
    """Faults of one transition. Non-finite residuals are reported by the visits that hold them."""
    return []
