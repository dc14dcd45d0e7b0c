import numpy as np
import pytest

from loopscope.metrics.probe.specialisation import (
    coactivation,
    coactivation_shares,
    domain_share,
    saturation,
    vocabulary_chance,
    vocabulary_specialisation,
)


def choices(tokens, experts, k, seed=0):
    return np.random.default_rng(seed).random((tokens, experts)).argsort(1)[:, :k]


def test_domain_share_against_counting():
    idx = choices(60, 5, 2).reshape(3, 20, 2)
    found = domain_share(idx, ["a", "b", "a"], 5)
    for domain, documents in (("a", [0, 2]), ("b", [1])):
        for expert in range(5):
            chose = sum(expert in token for d in documents for token in idx[d].tolist())
            assert found[domain][expert] == chose / (20 * len(documents))
        assert found[domain].sum() == pytest.approx(2)


@pytest.mark.parametrize(("occurrences", "expected"), [(1, 1.00), (5, 0.57), (20, 0.33), (1000, 0.15)])
def test_random_routing_looks_specialised_where_tokens_are_rare(occurrences, expected):
    types = max(20, 4000 // occurrences)
    ids = np.repeat(np.arange(types), occurrences)
    idx = choices(len(ids), 64, 8)
    value, counted = vocabulary_specialisation(idx, ids, 64, min_occurrences=1)
    assert counted == types
    assert value == pytest.approx(expected, abs=0.025)
    chance = vocabulary_chance(idx, ids, 64, np.random.default_rng(1), min_occurrences=1, num_permutations=2)
    assert chance == pytest.approx(expected, abs=0.025)


def test_vocabulary_against_counting_and_its_threshold():
    ids = np.array([7] * 6 + [3] * 4 + [9])
    idx = choices(11, 4, 2)
    value, counted = vocabulary_specialisation(idx, ids, 4, min_occurrences=4)
    shares = []
    for token in (3, 7):
        rows = idx[ids == token].tolist()
        shares.append(max(sum(e in row for row in rows) for e in range(4)) / len(rows))
    assert (value, counted) == (pytest.approx(np.mean(shares)), 2)
    nothing, counted = vocabulary_specialisation(idx, ids, 4)
    assert np.isnan(nothing)
    assert counted == 0


def test_coactivation_against_sets():
    idx = choices(50, 6, 3)
    counts = coactivation(idx, 6)
    sets = [set(row) for row in idx.tolist()]
    for i in range(6):
        for j in range(6):
            assert counts[i, j] == sum({i, j} <= one for one in sets)
    shares = coactivation_shares(counts)
    assert len(shares) == 15
    assert shares[0] == counts[0, 1] / max(counts[0, 0], counts[1, 1])


def test_saturation():
    idx = choices(30, 8, 3)
    assert saturation(idx, idx[:, ::-1]).tolist() == [1.0] * 30
    other = choices(30, 8, 3, seed=1)
    expected = [len(set(a) & set(b)) / 3 for a, b in zip(idx.tolist(), other.tolist(), strict=True)]
    assert saturation(idx, other).tolist() == pytest.approx(expected)
    assert saturation(idx % 4, idx % 4 + 4).tolist() == [0.0] * 30
