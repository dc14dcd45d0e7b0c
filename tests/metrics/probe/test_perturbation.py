import pytest
import torch

from loopscope.metrics.probe.perturbation import disturbance, flipped_share, frobenius, geometric_rate


def test_the_disturbance_has_its_length_per_token_and_no_direction():
    h = torch.randn(5, 40, 16) * torch.rand(5, 40, 1) * 100
    found = disturbance(h, torch.Generator().manual_seed(0))
    assert torch.allclose(found.norm(dim=-1), 1e-3 * h.norm(dim=-1), rtol=1e-4)
    flat = torch.nn.functional.normalize(found.reshape(200, 16), dim=-1)
    assert (flat @ flat.T).fill_diagonal_(0).mean().abs() < 0.02


@pytest.mark.parametrize("radius", [0.5, 1.0, 1.7])
def test_a_linear_map_gives_its_spectral_radius(radius):
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    h = torch.randn(2, 3, 8, dtype=torch.float64)
    other = h + disturbance(h, torch.Generator().manual_seed(1))
    distances = []
    for _ in range(5):
        h, other = (x @ rotation * radius for x in (h, other))
        distances.append(frobenius(h, other)[0])
    assert geometric_rate(distances) == pytest.approx(radius, rel=1e-6)


def test_rates_that_do_not_exist():
    assert geometric_rate([1.0]) is None
    assert geometric_rate([0.0, 1.0]) is None
    assert geometric_rate([1.0, 0.0]) is None


def test_flips_are_of_sets():
    a = torch.tensor([[[0, 1], [2, 3], [4, 5]]])
    b = torch.tensor([[[1, 0], [2, 4], [6, 7]]])
    assert flipped_share(a, b) == pytest.approx(2 / 3)
    assert flipped_share(a, a) == 0.0


def test_frobenius_of_equal_tensors_is_exactly_zero():
    h = torch.randn(2, 3, 4)
    assert frobenius(h, h.clone()) == (0.0, pytest.approx(float(h.norm()), rel=1e-6))
