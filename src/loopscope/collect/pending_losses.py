"""Losses that are still on the device: reduced over ranks and copied without waiting, read some steps later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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


class PendingLosses:
    """Packs each step's scalars into one vector, sums it over ranks, and gives them back later, in order.

    `submit` waits for nothing: no value is read, and on an accelerator the sum and the copy to pinned memory run
    on a stream of their own. At most `CAPACITY` steps wait; one more makes the oldest be waited for.
    """

    def __init__(self, reducer: RankReducer) -> None:
        self._reducer = reducer
        # Per step: whether its values are there, what waits for them, and what reads them.
        self._waiting: deque[tuple[Callable[[], bool], Callable[[], Any], Callable[[], StepLoss]]] = deque()
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
        factors = loss.lb_loss_factor, loss.z_loss_factor
        known = {name for name in _FIELDS if getattr(loss, name) is not None}
        self._waiting.append((is_ready, wait, partial(self._on_host, step, host, factors, loss.lr, known)))

    def drain(self, *, block: bool = False) -> Iterator[StepLoss]:
        """The losses that have arrived, in order of steps; with `block` all of them, by waiting."""
        while self._waiting:
            is_ready, wait, read = self._waiting[0]
            if not (block or len(self._waiting) > CAPACITY or is_ready()):
                return
            wait()
            self._waiting.popleft()
            yield read()

    def _on_host(
        self, step: int, host: Tensor, factors: tuple[float, float], lr: float | None, known: set[str]
    ) -> StepLoss:
        """Read the packed vector: pinned memory, or on a CPU the vector itself."""
        values = dict(zip(_FIELDS, host.tolist(), strict=True))
        if host.is_pinned():
            self._pinned.append(host)
        tokens = values["num_target_tokens"]
        # Of these every rank gave its own mean.
        for name in ("lb_loss", "z_loss", "other_loss", "grad_norm"):
            values[name] /= self._reducer.num_ranks
        loss = LossComponents(
            # Without targets the mean does not exist: NaN becomes null with a reason, never 0.
            task_loss=values["task_loss_sum"] / tokens if tokens else math.nan,
            lb_loss=values["lb_loss"],
            lb_loss_factor=factors[0],
            z_loss=values["z_loss"],
            z_loss_factor=factors[1],
            total_loss=values["total_loss"],
        )
        return StepLoss(
            step=step,
            loss=loss,
            grad_norm=values["grad_norm"] if "grad_norm" in known else None,
            lr=lr,
            task_loss_sum=values["task_loss_sum"],
            num_target_tokens=round(tokens),
            other_loss=values["other_loss"] if "other_loss" in known else None,
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
