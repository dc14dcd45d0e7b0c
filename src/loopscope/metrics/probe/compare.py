"""Differences between two checkpoints over the same documents, with bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over documents, and its 95% interval by resampling documents."""

    mean: float
    low: float
    high: float

    @property
    def meaningful(self) -> bool:
        """True where the interval does not include 0."""
        return self.low > 0 or self.high < 0


def paired_interval(
    difference_D: NDArray[np.float64], draw: np.random.Generator, num_bootstraps: int = NUM_BOOTSTRAPS
) -> Interval:
    """Mean of one difference per document, and the percentile bootstrap over documents (Efron 1979).

    Args:
        difference_D: the value under the second parameters less that under the first, document by document.
        draw: the only source of randomness.
        num_bootstraps: resamples of documents.
    """
    index = draw.integers(len(difference_D), size=(num_bootstraps, len(difference_D)))
    low, high = np.percentile(difference_D[index].mean(1), [2.5, 97.5])
    return Interval(float(difference_D.mean()), float(low), float(high))


def entropy_by_document(probs_DSE: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean routing entropy of each document's tokens in nats [D]; 0·ln 0 = 0."""
    logs = np.log(probs_DSE, out=np.zeros_like(probs_DSE), where=probs_DSE > 0)
    return np.asarray(-(probs_DSE * logs).sum(-1).mean(-1) + 0.0)
