import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax

from loopscope.models.loopmoe import load_balancing_loss, router_z_loss


@given(
    seed=st.integers(0, 2**31 - 1),
    num_experts=st.integers(1, 24),
    tokens=st.integers(1, 40),
    data=st.data(),
)
def test_losses_equal_a_float64_computation_written_differently(seed, num_experts, tokens, data):
    top_k = data.draw(st.integers(1, num_experts))
    logits = np.random.default_rng(seed).normal(size=(tokens, num_experts)) * 3
    chosen = np.argsort(-logits, axis=1)[:, :top_k]
    counts = np.bincount(chosen.ravel(), minlength=num_experts)
    expected = num_experts * np.dot(counts / counts.sum(), softmax(logits, axis=1).mean(0))

    logits_BSE = torch.tensor(logits, dtype=torch.float32)[None]
    probs_BSE = logits_BSE.softmax(-1)
    assert load_balancing_loss(probs_BSE, torch.tensor(chosen)[None]).item() == pytest.approx(
        expected, rel=1e-5
    )
    assert router_z_loss(logits_BSE).item() == pytest.approx(
        (logsumexp(logits, axis=1) ** 2).mean(), rel=1e-5
    )


def test_balanced_load_gives_exactly_one_whatever_k_is():
    for top_k in (1, 2, 4):
        idx = (torch.arange(8)[:, None] + torch.arange(top_k)) % 4
        assert load_balancing_loss(torch.full((1, 8, 4), 0.25), idx[None]).item() == 1.0


def test_z_loss_reference_point():
    logits = torch.tensor([[[0.0, 0.0], [1.0986122886681098, 0.0]]])
    assert router_z_loss(logits).item() == pytest.approx(1.2011325347955035, abs=1e-6)


def test_the_load_balancing_loss_pushes_probability_off_the_busy_expert():
    logits = torch.tensor([[[2.0, 0.0, 0.0]] * 4], requires_grad=True)
    load_balancing_loss(logits.softmax(-1), torch.zeros(1, 4, 1, dtype=torch.int64)).backward()
    assert (logits.grad[..., 0] > 0).all()
    assert (logits.grad[..., 1:] < 0).all()
