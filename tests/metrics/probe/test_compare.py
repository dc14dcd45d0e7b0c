import numpy as np
import pytest
from scipy.stats import entropy

from loopscope.metrics.probe.compare import entropy_by_document, paired_interval


def test_no_difference_is_no_meaningful_difference():
    found = paired_interval(np.zeros(20), np.random.default_rng(0))
    assert (found.mean, found.low, found.high, found.meaningful) == (0.0, 0.0, 0.0, False)


def test_noise_around_zero_is_not_and_a_shift_is_meaningful():
    noise = np.random.default_rng(1).normal(size=60)
    noise -= noise.mean()
    assert not paired_interval(noise, np.random.default_rng(0)).meaningful
    assert paired_interval(noise + 2, np.random.default_rng(0)).meaningful
    assert paired_interval(noise - 2, np.random.default_rng(0)).meaningful


def test_the_interval_of_a_normal_mean():
    values = np.random.default_rng(2).normal(3, 1, size=400)
    found = paired_interval(values, np.random.default_rng(0))
    half = 1.96 * values.std() / np.sqrt(400)
    assert found.low == pytest.approx(found.mean - half, abs=0.02)
    assert found.high == pytest.approx(found.mean + half, abs=0.02)


def test_entropy_against_scipy():
    probs = np.random.default_rng(3).dirichlet([0.3] * 6, size=(4, 9))
    probs[0, 0] = [1, 0, 0, 0, 0, 0]
    assert entropy_by_document(probs) == pytest.approx(entropy(probs, axis=-1).mean(-1))
