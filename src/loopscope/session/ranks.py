"""This process among its ranks, from torch.distributed where that is initialised."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from loopscope import errors
from loopscope.capture.adapter import Adapter
from loopscope.errors import ConfigError, LoopscopeError

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) in a single process."""
    dist = _initialised()
    return (0, 1) if dist is None else (dist.get_rank(), dist.get_world_size())


def decide(make: Callable[[], T], /) -> T:
    """Run `make` on rank 0 and give its result, or its exception, to every rank. Collective."""
    dist = _initialised()
    if dist is None or dist.get_world_size() == 1:
        return make()
    outcome: list[Any] = ["", None]
    own: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = ["", make()]
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must hear of it)
            own, outcome = error, [type(error).__name__, str(error)]
    dist.broadcast_object_list(outcome, src=0)
    if own is not None:
        raise own
    name, value = outcome
    if name:
        raise getattr(errors, name, LoopscopeError)(f"rank 0: {value}")
    return cast(T, value)


def gather(value: T, /) -> list[T]:
    """What every rank has to say, in the order of the ranks, on every rank. Collective.

    Args:
        value: plain data, this rank's.
    """
    dist = _initialised()
    if dist is None or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def loss_merge(adapter: Adapter, world_size: int) -> Callable[[Any], list[Any]] | None:
    """What gives the losses of all ranks; None where there is one, or where no forward tells its loss."""
    return gather if world_size > 1 and getattr(adapter, "objective", False) else None


def _initialised() -> Any:
    import torch.distributed as dist

    return dist if dist.is_available() and dist.is_initialized() else None


def rank_reducer(adapter: Adapter, world_size: int) -> Any:
    """What merges rows over ranks; None where there is one.

    Raises:
        ConfigError: the plan promises no visits, by which rows of several ranks are merged.
    """
    if world_size == 1:
        return None
    from loopscope.collect.ranks import GroupReducer

    if not adapter.expected_visits():
        raise ConfigError(
            "rows of several ranks are merged by the promised visits, and this plan promises none. Give every "
            "block of the plan its number of `calls` in one forward (at most, where it varies)."
        )
    return GroupReducer(next(iter(adapter.model.parameters())).device)
