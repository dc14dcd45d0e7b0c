from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from metrics_oracle import EDGES as WANT
from metrics_oracle import check_histogram, check_quantile

from loopscope.catalog.bins import EDGES, NUM_BINS
from loopscope.metrics.histogram import histogram, quantile


def test_the_edges_are_half_octaves():
    np.testing.assert_allclose(EDGES, WANT)
    assert len(EDGES) == NUM_BINS + 1


def test_every_power_of_two_starts_a_bin():
    powers = torch.exp2(torch.arange(-16, 16).float())
    got = histogram(powers, None).numpy()
    assert np.flatnonzero(got).tolist() == list(range(1, NUM_BINS, 2))
    below = histogram(powers * (1 - 1e-5), None).numpy()
    assert np.flatnonzero(below).tolist() == list(range(0, NUM_BINS - 1, 2))


@given(st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=50), st.floats(0, 1))
def test_counts_and_quantiles(values, q):
    diffs = torch.tensor(values, dtype=torch.float32)
    counts = histogram(diffs, None).double().numpy()
    check_histogram(counts, diffs.double().numpy())
    check_quantile(quantile(counts[None], q)[0], diffs.double().numpy(), q)


def test_masked_values_are_not_counted():
    got = histogram(torch.tensor([1.0, torch.nan, 1.0]), torch.tensor([True, False, False]))
    assert got.sum() == 1


def test_nothing_has_no_quantile():
    assert np.isnan(quantile(np.zeros((1, NUM_BINS)), 0.5)[0])


def test_the_open_bin_gives_its_lower_edge():
    counts = np.zeros(NUM_BINS)
    counts[-1] = 3
    assert quantile(counts[None], 0.5)[0] == 2.0**15


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=NUM_BINS, max_size=NUM_BINS), min_size=1, max_size=4),
    st.floats(0, 1),
)
def test_many_histograms_are_each_alone(rows, q):
    counts = np.array(rows, dtype=float)
    together = quantile(counts, q)
    for row, value in zip(counts, together, strict=True):
        np.testing.assert_equal(quantile(row[None], q)[0], value)
