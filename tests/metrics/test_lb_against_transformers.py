"""The load-balancing loss against transformers' own function, which is k times ours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_inputs import finished, mask, visit

mixtral = pytest.importorskip(
    "transformers.models.mixtral.modeling_mixtral", reason="transformers is not installed"
)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 32), st.data())
def test_ours_times_k(experts, data):
    k = data.draw(st.integers(1, experts))
    v = visit(experts=experts, k=k, seed=data.draw(st.integers(0, 999)), scale=2.0)
    valid = data.draw(st.booleans())
    attention = mask(v, "some") if valid else None
    theirs = mixtral.load_balancing_loss_func(
        (v.router_logits.reshape(-1, experts),),
        num_experts=experts,
        top_k=k,
        attention_mask=None if attention is None else attention.long(),
    )
    assert finished(v, attention).router["lb_loss"] * k == pytest.approx(float(theirs), rel=1e-5)


def test_theirs_pools_layers_and_ours_does_not():
    a = torch.tensor([[[10.0, 0.0]] * 4])
    visits = [visit(experts=2, k=1, logits=x) for x in (a, a.flip(-1))]
    theirs = mixtral.load_balancing_loss_func(
        tuple(v.router_logits.reshape(-1, 2) for v in visits), num_experts=2, top_k=1
    )
    assert float(theirs) == pytest.approx(1.0, abs=1e-4)
    assert all(finished(v).router["lb_loss"] > 1.99 for v in visits)


def test_z_and_entropy_against_torch():
    v = visit(experts=16, k=2)
    row = finished(v).router
    z = torch.logsumexp(v.router_logits.double(), -1)
    assert row["z_sq_mean"] == pytest.approx(z.square().mean().item(), rel=1e-6)
    entropy = torch.distributions.Categorical(logits=v.router_logits.double()).entropy().mean().item()
    assert row["token_entropy_mean"] == pytest.approx(entropy, rel=1e-6)
    # Cross-entropy of a distribution with itself is its entropy.
    soft = v.router_logits.double().softmax(-1).reshape(-1, 16)
    self_ce = torch.nn.functional.cross_entropy(v.router_logits.double().reshape(-1, 16), soft).item()
    assert row["token_entropy_mean"] == pytest.approx(self_ce, rel=1e-6)
