"""Every random stream a forward can draw from, saved and put back bit for bit."""

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

Restore = Callable[[], object]


def save_random_streams(model: nn.Module) -> list[Restore]:
    """Save every random stream that `model`'s forward can draw from; each returned call puts one back.

    Python's and NumPy's global streams, torch's CPU generator, the generators of every device of the
    accelerator, DTensor's tracker, and the generators that a module keeps as an attribute of its own.
    """
    # The tracker goes first: putting it back may be a matter of the accelerator's generators, which follow.
    return [
        *_dtensor_tracker(),
        partial(random.setstate, random.getstate()),
        *_numpy(),
        partial(torch.set_rng_state, torch.get_rng_state()),
        *_accelerator(),
        *_own_generators(model),
    ]


def _numpy() -> Iterator[Restore]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:  # a process that never imported it has no stream to disturb
        yield partial(numpy.random.set_state, numpy.random.get_state())


def _accelerator() -> Iterator[Restore]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return
    module: Any = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():
        return  # asking for a state would initialise the device; nothing on it can have been drawn
    if hasattr(module, "get_rng_state_all"):
        yield partial(module.set_rng_state_all, module.get_rng_state_all())
    else:
        yield partial(module.set_rng_state, module.get_rng_state())


def _dtensor_tracker() -> Iterator[Restore]:
    # DTensor's random operators go through one tracker per process, made at their first use. On current torch
    # its state is the device generator's plus a flag; older ones keep states of their own in a dict.
    holder: Any = sys.modules.get("torch.distributed.tensor._random")
    if holder is None or not hasattr(holder, "_rng_tracker"):
        return
    tracker = holder._rng_tracker
    if tracker is None:
        yield partial(setattr, holder, "_rng_tracker", None)
        return
    enabled = getattr(tracker, "_use_distribute_region", None)
    own = getattr(tracker, "rng_states", None)
    saved = None if own is None else {name: state.clone() for name, state in own.items()}

    def restore() -> None:
        holder._rng_tracker = tracker
        if enabled is not None:
            tracker._use_distribute_region = enabled
        if own is not None and saved is not None:
            own.clear()
            own.update(saved)

    yield restore


def _own_generators(model: nn.Module) -> Iterator[Restore]:
    seen: set[int] = set()
    for module in model.modules():
        for value in list(vars(module).values()):
            if id(value) not in seen:
                seen.add(id(value))
                yield from _generator(value)


def _generator(value: Any) -> Iterator[Restore]:
    if isinstance(value, torch.Generator):
        yield partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield partial(value.setstate, value.getstate())
    elif (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.Generator):
            yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        elif isinstance(value, numpy.random.RandomState):
            yield partial(value.set_state, value.get_state())
