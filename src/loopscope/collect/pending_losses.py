"""Losses that are still on the device: reduced over ranks and copied without waiting, read some steps later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopscope.collect.loss import StepLoss
from loopscope.collect.ranks import Pending, RankReducer
from loopscope.trace import LossComponents

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

CAPACITY = 8
"""Steps that may wait at once: at most so many loss rows are lost when the process dies."""

_FIELDS = ("task_loss_sum", "num_target_tokens", "lb_loss", "z_loss", "total_loss", "other_loss", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceLoss:
    """One rank's part of a step's loss, as detached scalars on the device."""

    task_loss_sum: Float[Tensor, ""]
    """Summed cross-entropy over this rank's target tokens, in nats."""
    num_target_tokens: Tensor
    """This rank's target tokens; any numeric type."""
    lb_loss: Float[Tensor, ""]
    """Load-balancing loss: this rank's mean over visits and microbatches."""
    z_loss: Float[Tensor, ""]
    """Router z-loss: this rank's mean over visits and microbatches."""
    total_loss: Float[Tensor, ""]
    """This rank's share of what backward ran on: the shares of all ranks add up to the objective."""
    lb_loss_factor: float
    """Factor of lb_loss in the objective."""
    z_loss_factor: float
    """Factor of z_loss in the objective."""
    other_loss: Float[Tensor, ""] | None = None
    """Further terms, already weighted: this rank's mean over microbatches; None where none is declared."""
    grad_norm: Float[Tensor, ""] | None = None
    """Norm before clipping, the same on all ranks; None where it is not known."""
    lr: float | None = None
    """Learning rate of the update."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    step: int
    host: Tensor
    """The packed vector, once it is ready: pinned memory, or on a CPU the vector itself."""
    is_ready: Callable[[], bool]
    wait: Callable[[], Any]
    factors: tuple[float, float]
    lr: float | None
    has_other: bool
    has_norm: bool


class PendingLosses:
    """Packs each step's scalars into one vector, sums it over ranks, and gives them back later, in order.

    `submit` waits for nothing: no value is read, and on an accelerator the sum and the copy to pinned memory run
    on a stream of their own. At most `CAPACITY` steps wait; one more makes the oldest be waited for.
    """

    def __init__(self, reducer: RankReducer) -> None:
        self._reducer = reducer
        self._waiting: deque[_Waiting] = deque()
        self._pinned: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, step: int, loss: DeviceLoss) -> None:
        """Take one step's scalars. Collective: every rank submits every step."""
        device = loss.total_loss.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        values = [zero if value is None else value for value in (getattr(loss, name) for name in _FIELDS)]
        vector = torch.stack([value.detach().to(device=device, dtype=torch.float64) for value in values])
        pending = self._reducer.start_sum(vector)
        if device.type == "cuda":
            host, is_ready, wait = self._copy(vector, pending)
        else:
            host, is_ready, wait = vector, pending.is_completed, pending.wait
        self._waiting.append(
            _Waiting(
                step=step,
                host=host,
                is_ready=is_ready,
                wait=wait,
                factors=(loss.lb_loss_factor, loss.z_loss_factor),
                lr=loss.lr,
                has_other=loss.other_loss is not None,
                has_norm=loss.grad_norm is not None,
            )
        )

    def drain(self, *, block: bool = False) -> Iterator[StepLoss]:
        """The losses that have arrived, in order of steps; with `block` all of them, by waiting."""
        while self._waiting:
            first = self._waiting[0]
            if not (block or len(self._waiting) > CAPACITY or first.is_ready()):
                return
            first.wait()
            self._waiting.popleft()
            yield self._on_host(first)

    def _on_host(self, entry: _Waiting) -> StepLoss:
        num_ranks = self._reducer.num_ranks
        values = dict(zip(_FIELDS, entry.host.tolist(), strict=True))
        if entry.host.is_pinned():
            self._pinned.append(entry.host)
        tokens = values["num_target_tokens"]
        lb_factor, z_factor = entry.factors
        loss = LossComponents(
            # Without targets the mean does not exist: NaN becomes null with a reason, never 0.
            task_loss=values["task_loss_sum"] / tokens if tokens else math.nan,
            lb_loss=values["lb_loss"] / num_ranks,
            lb_loss_factor=lb_factor,
            z_loss=values["z_loss"] / num_ranks,
            z_loss_factor=z_factor,
            total_loss=values["total_loss"],
        )
        return StepLoss(
            step=entry.step,
            loss=loss,
            grad_norm=values["grad_norm"] / num_ranks if entry.has_norm else None,
            lr=entry.lr,
            task_loss_sum=values["task_loss_sum"],
            num_target_tokens=round(tokens),
            other_loss=values["other_loss"] / num_ranks if entry.has_other else None,
        )

    def _copy(self, vector: Tensor, pending: Pending) -> tuple[Tensor, Callable[[], bool], Callable[[], Any]]:
        """Copy to pinned memory behind the reduction, on a side stream; the training stream waits for neither."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(vector.device)  # type: ignore[no-untyped-call]
        host = (
            self._pinned.pop()
            if self._pinned
            else torch.empty(len(_FIELDS), dtype=torch.float64).pin_memory()
        )
        self._stream.wait_stream(torch.cuda.current_stream(vector.device))
        with torch.cuda.stream(self._stream):
            pending.wait()
            host.copy_(vector, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        vector.record_stream(self._stream)
        return host, done.query, done.synchronize
