"""What experts are chosen for: domains, tokens of the vocabulary, and each other."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MIN_OCCURRENCES = 100
"""A token of the vocabulary counts from this many occurrences on: rare ones look specialised by chance."""


def domain_share(
    idx_DSK: NDArray[np.int64], domains: Sequence[str], num_experts: int
) -> dict[str, NDArray[np.float64]]:
    """Domain → N_{e,D}/N_D [E]: share of the domain's tokens that chose expert e (Muennighoff et al. 2024).

    Args:
        idx_DSK: chosen experts [D, S, k], one document a row.
        domains: each document's domain.
        num_experts: E.
    """
    found = {}
    for domain in dict.fromkeys(domains):
        chosen = idx_DSK[[index for index, name in enumerate(domains) if name == domain]]
        found[domain] = np.bincount(chosen.ravel(), minlength=num_experts) / (chosen.size / chosen.shape[-1])
    return found


def vocabulary_specialisation(
    idx_NK: NDArray[np.int64],
    ids_N: NDArray[np.int64],
    num_experts: int,
    *,
    min_occurrences: int = MIN_OCCURRENCES,
) -> tuple[float, int]:
    """(mean over tokens x with N_x >= `min_occurrences` of max_e N_{e,x}/N_x, number of such x).

    (NaN, 0) where no token occurs that often.

    Args:
        idx_NK: chosen experts [N, k].
        ids_N: the token at each position.
        num_experts: E.
        min_occurrences: rarer tokens are left out.
    """
    _, type_N, count_X = np.unique(ids_N, return_inverse=True, return_counts=True)
    frequent_X = count_X >= min_occurrences
    if not frequent_X.any():
        return float("nan"), 0
    cells = (type_N.reshape(-1, 1) * num_experts + idx_NK).ravel()
    count_XE = np.bincount(cells, minlength=len(count_X) * num_experts).reshape(len(count_X), num_experts)
    share_X = count_XE.max(1)[frequent_X] / count_X[frequent_X]
    return float(share_X.mean()), int(frequent_X.sum())


def vocabulary_chance(
    idx_NK: NDArray[np.int64],
    ids_N: NDArray[np.int64],
    num_experts: int,
    draw: np.random.Generator,
    *,
    min_occurrences: int = MIN_OCCURRENCES,
    num_permutations: int = 10,
) -> float:
    """`vocabulary_specialisation` where tokens and choices are matched at random: mean over permutations."""
    values = [
        vocabulary_specialisation(
            idx_NK, draw.permutation(ids_N), num_experts, min_occurrences=min_occurrences
        )[0]
        for _ in range(num_permutations)
    ]
    return float(np.mean(values))


def coactivation(idx_NK: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """N_ij [E, E]: tokens that chose both i and j; the diagonal is N_i. N_ij/N_i is co-activation."""
    chosen_NE = np.zeros((len(idx_NK), num_experts))
    np.put_along_axis(chosen_NE, idx_NK, 1.0, axis=1)
    return np.rint(chosen_NE.T @ chosen_NE).astype(np.int64)


def coactivation_shares(count_EE: NDArray[np.int64]) -> NDArray[np.float64]:
    """N_ij/N_i over all unordered pairs i < j, with i the more often chosen of the two; unused pairs left out.

    An unordered pair has two quotients; the one over the more frequent expert is the smaller, so that a rare
    expert does not look bound to a common one.
    """
    used = np.diag(count_EE)
    i, j = np.triu_indices(len(count_EE), 1)
    larger = np.maximum(used[i], used[j])
    return np.asarray(count_EE[i, j][larger > 0] / larger[larger > 0], dtype=np.float64)


def saturation(idx_NK: NDArray[np.int64], other_NK: NDArray[np.int64]) -> NDArray[np.float64]:
    """|S ∩ S'|/k per token [N], of one visit at two checkpoints."""
    shared_N: NDArray[np.int64] = (idx_NK[:, :, None] == other_NK[:, None, :]).any(-1).sum(-1)
    return np.asarray(shared_N / idx_NK.shape[-1], dtype=np.float64)
