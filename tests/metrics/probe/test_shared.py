import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopscope.metrics.family import Null
from loopscope.metrics.probe.shared import finish_shared, shared_counts


def choices(tokens, experts, k, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(k).indices


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.data())
def test_against_sets(tokens, experts, data):
    k = data.draw(st.integers(1, experts))
    a, b = (choices(tokens, experts, k, data.draw(st.integers(0, 99))) for _ in range(2))
    counts = shared_counts(a.to(torch.int16), b.to(torch.int16)).double().numpy()
    sets = [(set(x), set(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    loads = [np.bincount(x.flatten().numpy(), minlength=experts).astype(float) for x in (a, b)]
    found = finish_shared(counts, experts, from_count=loads[0], to_count=loads[1])
    assert found["topk_overlap"] == pytest.approx(np.mean([len(x & y) / k for x, y in sets]))
    assert found["topk_jaccard"] == pytest.approx(np.mean([len(x & y) / len(x | y) for x, y in sets]))
    shares = [load / load.sum() for load in loads]
    assert found["load_overlap"] == pytest.approx(sum(min(p) for p in zip(*shares, strict=True)))
    assert found["overlap_chance"] == k / experts


def test_disjoint_visits_and_equal_ones():
    a = torch.tensor([[0, 1], [2, 3]])
    b = torch.tensor([[2, 3], [0, 1]])
    count = np.ones(4)
    disjoint = finish_shared(shared_counts(a, b).double().numpy(), 4, from_count=count, to_count=count)
    assert (disjoint["topk_overlap"], disjoint["topk_jaccard"]) == (0.0, 0.0)
    equal = finish_shared(shared_counts(a, a.flip(1)).double().numpy(), 4, from_count=count, to_count=count)
    assert (equal["topk_overlap"], equal["topk_jaccard"], equal["load_overlap"]) == (1.0, 1.0, 1.0)


def test_chance_of_the_reference_point():
    found = finish_shared(np.array([0.0, 0.0, 0.0]), 8, from_count=None, to_count=None)
    assert found["overlap_chance"] == 0.25
    assert found["jaccard_chance"] == pytest.approx(0.1786, abs=5e-5)
    assert found["topk_overlap"] == Null("absent:no valid token")
