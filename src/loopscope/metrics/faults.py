"""What can be wrong with the values of an input, judged on the host from counters in the partial sums."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loopscope.metrics.family import Partials

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


def visit_faults(partials: Partials) -> Iterator[tuple[int, Fault]]:
    """(index of the visit, fault) of V visits of one layout, from their merged counters."""
    tokens = partials.tokens.astype(np.int64)
    if partials.num_experts:
        like_probs = (partials.number("prob_like") == tokens) & (tokens > 0)
        for index in np.flatnonzero(like_probs & (partials.num_experts >= 2)).tolist():
            text = (
                f"router_logits hold probabilities: every one of {tokens[index]} rows lies in [0, 1] and sums to 1; "
                "expected raw router outputs. Record the logits before the softmax (or sigmoid)."
            )
            yield index, Fault("probabilities_as_logits", int(tokens[index]), text, fatal=True)
        for index, count in _counted(partials.number("bad_index")):
            text = (
                f"topk_idx has {count} entries outside [0, {partials.num_experts}), expected expert indices of this "
                "layer. Check that num_experts is this layer's own, and that indices are not global."
            )
            yield index, Fault("index_out_of_range", count, text, fatal=True)
        for index, count in _counted(partials.number("bad_weights")):
            text = (
                f"topk_weights of {count} of {tokens[index]} tokens do not sum to 1; expected combine weights "
                "renormalised over the chosen experts. Record them after renormalisation, before any scaling."
            )
            yield index, Fault("weights_not_normalised", count, text, fatal=False)
    for name in ("router_logits", "router_probs", "topk_weights", "choice_scores", "residual"):
        for index, count in _counted(partials.nonfinite(name)):
            text = f"{name} has {count} non-finite entries in valid tokens."
            yield index, Fault("nonfinite", count, text, fatal=False)


def _counted(counts: NDArray[Any]) -> Iterator[tuple[int, int]]:
    for index in np.flatnonzero(counts > 0).tolist():
        yield index, int(counts[index])
