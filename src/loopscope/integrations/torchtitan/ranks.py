"""Decisions of rank 0 that every rank must share, errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from loopscope import errors
from loopscope.errors import LoopscopeError

T = TypeVar("T")


def decide(make: Callable[[], T]) -> T:
    """Run `make` on rank 0 and give its result to every rank.

    An exception of rank 0 is raised on every rank, so that none waits for the others: errors of loopscope with
    their own class, others as LoopscopeError. Collective; call it from every rank. The result must pickle.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    outcome: list[tuple[str, object]] = [("", None)]
    own: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [("", make())]
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must hear of it)
            own = error
            outcome = [(type(error).__name__, str(error))]
    dist.broadcast_object_list(outcome, src=0)
    name, value = outcome[0]
    if own is not None:
        raise own
    if name:
        found = getattr(errors, name, LoopscopeError)
        raise found(f"rank 0: {value}")
    return value  # type: ignore[return-value]
