"""The gradient norm of a step, which torchtitan keeps in a local variable of ``train_step``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan import trainer as titan_trainer


@dataclass(slots=True)
class GradNorm:
    """Filled in while the block runs."""

    total: torch.Tensor | None = None
    """Norm before clipping, a scalar on the device; None where nothing was clipped yet."""


@contextmanager
def captured_grad_norm() -> Iterator[GradNorm]:
    """Note the total norm that torchtitan's trainer computes for clipping; no second pass over the gradients.

    Only the trainer module's own name is replaced, and put back in `finally`.
    """
    found, real = GradNorm(), titan_trainer.dist_utils

    def clip_grad_norm_(*args: Any, **kwargs: Any) -> torch.Tensor:
        norm: torch.Tensor = real.clip_grad_norm_(*args, **kwargs)
        found.total = norm.detach()
        return norm

    titan_trainer.dist_utils = SimpleNamespace(**{**vars(real), "clip_grad_norm_": clip_grad_norm_})
    try:
        yield found
    finally:
        titan_trainer.dist_utils = real
