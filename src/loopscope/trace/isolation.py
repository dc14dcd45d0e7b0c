"""A forward after which training continues as if it had not happened."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.trace.isolation_rng import Restore, save_random_streams

_PLAIN = (bool, int, float, str, type(None))
_ABSENT = object()


@contextmanager
def isolated_forward(model: nn.Module) -> Iterator[None]:
    """Run the body with `model` in eval mode, without gradients and without compilation; put back all of it.

    Put back in any case: random streams (`isolation_rng`), `training` of every submodule one by one, buffers
    (contents, and the object where a module replaced it), plain attributes of modules that hold a number,
    text or tensor, `_skip_lm_head`, and FSDP2's sharded state. State that a model keeps elsewhere (in a
    list or dict of its own, outside its modules) is out of reach. An interrupt takes effect afterwards.
    """
    with ExitStack() as stack:
        stack.enter_context(deferred_interrupt())
        # Closed in reverse order: random streams last, so that nothing after them can draw.
        for restore in save_random_streams(model):
            stack.callback(restore)
        stack.callback(_reshard, model)
        for restore in _save_modules(model):
            stack.callback(restore)
        stack.enter_context(_forced_eager())
        stack.enter_context(torch.no_grad())
        for module in model.modules():
            # The flag itself, not .eval(): a module may override train() with side effects, such as folding
            # adapter weights into its parameters.
            module.training = False
            _return_logits(module)
        yield


def _forced_eager() -> AbstractContextManager[Any]:
    # Importing dynamo takes seconds; what was not imported has compiled nothing.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _return_logits(module: nn.Module) -> None:
    # With a chunked loss, torchtitan's model returns hidden states and the loss applies the head.
    own = vars(module).get("_skip_lm_head", getattr(type(module), "_skip_lm_head", False))
    if own is True:
        module._skip_lm_head = False  # type: ignore[assignment]  # nn.Module types every attribute as a tensor


def _save_modules(model: nn.Module) -> list[Restore]:
    # Every value and content is saved before anything is changed. A tensor known under several names is
    # copied once.
    contents: dict[int, Restore] = {}
    restores: list[Restore] = []
    for module in model.modules():
        restores.append(partial(setattr, module, "training", module.training))
        restores += [_save_buffer_table(module), _save_attributes(module)]
        for value in (*module._buffers.values(), *vars(module).values()):
            if (
                isinstance(value, Tensor)
                and not isinstance(value, nn.Parameter)
                and id(value) not in contents
            ):
                contents[id(value)] = _save_content(value)
    return [*restores, *contents.values()]


def _save_buffer_table(module: nn.Module) -> Restore:
    table, transient = dict(module._buffers), set(module._non_persistent_buffers_set)

    def restore() -> None:
        module._buffers.clear()
        module._buffers.update(table)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(transient)

    return restore


def _save_attributes(module: nn.Module) -> Restore:
    # A number that a module counts up in eval, a cache that was None, a tensor that is no buffer. A new
    # attribute is left alone, since frameworks hang their own state on modules at the first forward.
    own = vars(module)
    saved = {name: value for name, value in own.items() if isinstance(value, (*_PLAIN, Tensor))}
    skip = own.get("_skip_lm_head", _ABSENT)

    def restore() -> None:
        own.update(saved)
        if skip is _ABSENT:
            own.pop("_skip_lm_head", None)

    return restore


def _save_content(tensor: Tensor) -> Restore:
    return partial(_put_back, tensor, _written_once(tensor).detach().clone())


def _put_back(tensor: Tensor, saved: Tensor) -> None:
    # `.data` writes without telling autograd, so a graph that saved the buffer stays valid.
    target = _written_once(tensor.data)
    if target.shape == saved.shape and target.dtype == saved.dtype and target.device == saved.device:
        target.copy_(saved)
    else:  # resized or given other data in place
        tensor.data = saved


def _written_once(tensor: Tensor) -> Tensor:
    # An expanded tensor names one memory cell several times and refuses to be written; one of each is enough.
    if tensor.layout is not torch.strided:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _reshard(model: nn.Module) -> None:
    # A forward without a backward leaves blocks with reshard_after_forward=False gathered; the next optimizer
    # step updates the shards, and the forward after it would read the old gathered values.
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in model.modules():
        if isinstance(module, kind):
            module.reshard()


PATIENCE = 3
"""This many interrupts take effect at once instead of at the end of the probe."""


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back while the block runs, then let the handler that was there have it.

    Does nothing outside the main thread, where no signal is handled, and where the handler is not Python's.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    received = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received >= PATIENCE:
            signal.signal(signal.SIGINT, previous)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if 0 < received < PATIENCE:
            signal.raise_signal(signal.SIGINT)
