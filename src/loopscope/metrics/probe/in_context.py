"""How often a token, and the pair that it ends, occurred earlier in its document: in-context repetition."""

import numpy as np
from numpy.typing import NDArray

BUCKETS = ("0", "1", "2-3", "4+")
"""Names of the buckets of a number of earlier occurrences."""

_UPPER = np.array([1, 2, 4])


def earlier_targets(ids_DS: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per position that has a target, how often the target occurs in the document up to that position.

    Position s predicts ids[d, s + 1]; its context is ids[d, 0..s].

    Args:
        ids_DS: token ids [D, S], S >= 2, one document a row.

    Returns:
        Counts [D, S - 1].

    >>> earlier_targets(np.array([[7, 5, 7, 7, 5]])).tolist()
    [[0, 1, 2, 1]]
    """
    return np.stack([_rank_among_equals(ids_S)[1:] for ids_S in ids_DS])


def earlier_bigrams(ids_DS: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per position that has a target, how often the pair (ids[s], target) occurs in the document before.

    Args:
        ids_DS: token ids [D, S], non-negative, S >= 2, one document a row.

    Returns:
        Counts [D, S - 1].

    >>> earlier_bigrams(np.array([[7, 5, 7, 5, 7]])).tolist()
    [[0, 0, 1, 1]]
    """
    pairs = ids_DS[:, :-1] * (int(ids_DS.max()) + 1) + ids_DS[:, 1:]
    return np.stack([_rank_among_equals(pairs_S) for pairs_S in pairs])


def bucket_index(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into `BUCKETS` of every count.

    >>> bucket_index(np.array([0, 1, 2, 3, 4, 99])).tolist()
    [0, 1, 2, 2, 3, 3]
    """
    return np.searchsorted(_UPPER, counts, side="right")


def _rank_among_equals(values: NDArray[np.int64]) -> NDArray[np.int64]:
    # A stable sort puts equals beside each other in their order; each one's distance to the first is its rank.
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    first = np.repeat(starts, np.diff(np.r_[starts, len(values)]))
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.arange(len(values)) - first
    return rank
