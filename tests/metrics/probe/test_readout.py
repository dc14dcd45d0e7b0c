import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from loopscope.metrics.probe.readout import Settling, readout_sums, settled


def logits(seed, tokens=7, vocab=11):
    return torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(seed))


def test_against_scipy():
    ids = torch.arange(7)
    now, before = logits(0), logits(1)
    found = readout_sums(now, before, ids)
    q, p = log_softmax(now.double().numpy(), -1), log_softmax(before.double().numpy(), -1)
    assert float(found.loss) == pytest.approx(-sum(q[s, s + 1] for s in range(6)), rel=1e-6)
    assert float(found.entropy) == pytest.approx(-(np.exp(q) * q).sum(), rel=1e-6)
    assert float(found.kl) == pytest.approx((np.exp(p) * (p - q)).sum(), rel=1e-6)


def test_a_fixed_point_has_no_divergence_at_all():
    same = logits(0)
    assert float(readout_sums(same, same.clone(), torch.arange(7)).kl) == 0.0
    assert readout_sums(same, None, torch.arange(7)).kl is None


def test_uniform_logits():
    found = readout_sums(torch.zeros(5, 8, dtype=torch.bfloat16), None, torch.arange(5))
    assert float(found.loss) == pytest.approx(4 * np.log(8), rel=1e-6)
    assert float(found.entropy) == pytest.approx(5 * np.log(8), rel=1e-6)


def test_settled_is_equality_with_every_later_step():
    argmax = torch.randint(3, (5, 40), generator=torch.Generator().manual_seed(2))
    found = settled(argmax)
    for r in range(5):
        for n in range(40):
            assert found[r, n] == all(argmax[r, n] == argmax[later, n] for later in range(r, 5))


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 3), st.integers(0, 10**6))
def test_settling_step_by_step_counts_what_the_whole_matrix_shows(steps, tokens, vocab, seed):
    argmax_RN = torch.randint(vocab, (steps, tokens), generator=torch.Generator().manual_seed(seed))
    streaming = Settling(tokens, torch.device("cpu"))
    for argmax_N in argmax_RN:
        streaming.add(argmax_N)
    assert streaming.counts() == settled(argmax_RN).sum(1).tolist()
