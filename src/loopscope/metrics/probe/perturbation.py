"""How a small disturbance of the loop's input grows from pass to pass."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

EPSILON = 1e-3
"""Size of the disturbance of a token, as a share of its ‖h‖."""


def disturbance(
    h_BSD: Float[Tensor, "B S d"], generator: torch.Generator, epsilon: float = EPSILON
) -> Float[Tensor, "B S d"]:
    """A random direction per token, isotropic, of length ε·‖h_t‖."""
    noise = torch.randn(h_BSD.shape, generator=generator, device=generator.device, dtype=h_BSD.dtype)
    noise = noise.to(h_BSD.device)
    length: Tensor = epsilon * h_BSD.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    return noise * length


def frobenius(h_BSD: Float[Tensor, "B S d"], other_BSD: Float[Tensor, "B S d"]) -> tuple[float, float]:
    """(‖h' − h‖_F, ‖h‖_F), summed in float64."""
    return (
        float((other_BSD.double() - h_BSD.double()).norm()),
        float(h_BSD.double().norm()),
    )


def flipped_share(idx_BSK: Int[Tensor, "B S k"], other_BSK: Int[Tensor, "B S k"]) -> float:
    """Share of tokens whose set of experts changed; the order within a token does not count."""
    return float((idx_BSK.sort(-1).values != other_BSK.sort(-1).values).any(-1).double().mean())


def geometric_rate(distances: Sequence[float]) -> float | None:
    """Factor per step from the first distance to the last: (d_n/d_1)^(1/(n − 1)).

    None with fewer than two distances, or where one of the two ends is zero.

    >>> geometric_rate([8.0, 4.0, 2.0])
    0.5
    """
    if len(distances) < 2 or distances[0] <= 0 or distances[-1] <= 0:
        return None
    return math.exp((math.log(distances[-1]) - math.log(distances[0])) / (len(distances) - 1))
