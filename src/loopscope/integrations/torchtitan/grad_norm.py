"""The gradient norm of a step, which torchtitan keeps in a local variable of ``train_step``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan import trainer as titan_trainer


@dataclass(slots=True)
class GradNorm:
    """Filled in while the block runs."""

    total: torch.Tensor | None = None
    """Norm before clipping, a scalar on the device; None where nothing was clipped yet."""


class _Watched:
    """``dist_utils`` with one function that also notes what it returns."""

    def __init__(self, real: Any, found: GradNorm) -> None:
        self._real, self._found = real, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm: torch.Tensor = self._real.clip_grad_norm_(*args, **kwargs)
        self._found.total = norm.detach()
        return norm


@contextmanager
def captured_grad_norm() -> Iterator[GradNorm]:
    """Note the total norm that torchtitan's trainer computes for clipping; no second pass over the gradients.

    Only the trainer module's own name is replaced, and put back in `finally`.
    """
    found, real = GradNorm(), titan_trainer.dist_utils
    titan_trainer.dist_utils = _Watched(real, found)
    try:
        yield found
    finally:
        titan_trainer.dist_utils = real
