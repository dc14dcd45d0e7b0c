"""Sums and maxima over ranks: the only place of loopscope's collectors that communicates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float64
    from torch import Tensor


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> Any:
        """Return when its result may be used (on an accelerator: may be used by the current stream)."""

    def is_completed(self) -> bool:
        """True where `wait` would return at once."""


class RankReducer(Protocol):
    """Element-wise reductions over all ranks that saw different tokens. Every method is collective."""

    @property
    def device(self) -> torch.device | None:
        """Where the buffers live; None: where the vectors are."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that are reduced over."""

    @property
    def is_writer(self) -> bool:
        """True on the one rank that writes the rows."""

    def sum(self, buffer: Float64[Tensor, " n"]) -> None:
        """Replace `buffer` by its sum over ranks."""

    def max(self, buffer: Float64[Tensor, " n"]) -> None:
        """Replace `buffer` by its maximum over ranks."""

    def start_sum(self, buffer: Float64[Tensor, " n"]) -> Pending:
        """Begin to replace `buffer` by its sum over ranks, without waiting."""


class LocalReducer:
    """`RankReducer` of a rank that merges with no other: it does nothing."""

    device, num_ranks, is_writer = None, 1, True

    def sum(self, buffer: Tensor) -> None:
        """See `RankReducer`."""

    def max(self, buffer: Tensor) -> None:
        """See `RankReducer`."""

    def start_sum(self, buffer: Tensor) -> Pending:
        """See `RankReducer`."""
        return self

    def wait(self) -> None:
        """See `Pending`."""

    def is_completed(self) -> bool:
        """See `Pending`."""
        return True


class GroupReducer:
    """`RankReducer` over a torch.distributed group: ranks that hold different tokens, each once.

    Args:
        device: where the traced tensors live.
        group: the group of data-parallel ranks (torchtitan's `loss` mesh); None for all ranks. Ranks that hold
            the same tokens must not be in it together.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = group
        self.device = device
        self.num_ranks: int = dist.get_world_size(group)
        self.is_writer: bool = dist.get_rank() == 0

    def sum(self, buffer: Tensor) -> None:
        """See `RankReducer`."""
        self._dist.all_reduce(buffer, op=self._dist.ReduceOp.SUM, group=self._group)

    def max(self, buffer: Tensor) -> None:
        """See `RankReducer`."""
        self._dist.all_reduce(buffer, op=self._dist.ReduceOp.MAX, group=self._group)

    def start_sum(self, buffer: Tensor) -> Pending:
        """See `RankReducer`."""
        pending: Pending = self._dist.all_reduce(
            buffer, op=self._dist.ReduceOp.SUM, group=self._group, async_op=True
        )
        return pending
