"""Every random stream a forward can draw from, saved and put back bit for bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Restore = Callable[[], None]


def save_random_streams(model: nn.Module) -> list[Restore]:
    """Save every random stream that `model`'s forward can draw from; each returned call puts one back.

    Python's and NumPy's global streams, torch's CPU generator, the generators of every device of the
    accelerator, DTensor's tracker, and the generators that a module keeps as an attribute of its own.
    """
    # The tracker goes first: putting it back may be a matter of the accelerator's generators, which follow.
    return [*_dtensor_tracker(), *_python(), *_numpy(), *_torch(), *_accelerator(), *_own_generators(model)]


def _python() -> Iterator[Restore]:
    state = random.getstate()
    yield lambda: random.setstate(state)


def _numpy() -> Iterator[Restore]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:  # a process that never imported it has no stream to disturb
        state = numpy.random.get_state()
        yield lambda: numpy.random.set_state(state)


def _torch() -> Iterator[Restore]:
    state = torch.get_rng_state()
    yield lambda: torch.set_rng_state(state)


def _accelerator() -> Iterator[Restore]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return
    module: Any = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():
        return  # asking for a state would initialise the device; nothing on it can have been drawn
    if hasattr(module, "get_rng_state_all"):
        states = module.get_rng_state_all()
        yield lambda: module.set_rng_state_all(states)
    else:
        state = module.get_rng_state()
        yield lambda: module.set_rng_state(state)


def _dtensor_tracker() -> Iterator[Restore]:
    # DTensor's random operators go through one tracker per process, made at their first use. On current torch
    # its state is the device generator's plus a flag; older ones keep states of their own in a dict.
    holder: Any = sys.modules.get("torch.distributed.tensor._random")
    if holder is None or not hasattr(holder, "_rng_tracker"):
        return
    tracker = holder._rng_tracker
    if tracker is None:

        def forget() -> None:
            holder._rng_tracker = None

        yield forget
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
        state = value.get_state()
        yield lambda: _discard(value.set_state(state))
    elif isinstance(value, random.Random):
        python_state = value.getstate()
        yield lambda: value.setstate(python_state)
    elif (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            bits_state = bits.state
            yield lambda: setattr(bits, "state", bits_state)
        elif isinstance(value, numpy.random.RandomState):
            legacy_state = value.get_state()
            yield lambda: value.set_state(legacy_state)


def _discard(_: object) -> None:
    """Make a call that returns something a Restore."""
