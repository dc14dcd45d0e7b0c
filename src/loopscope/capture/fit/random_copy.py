"""A copy of a module that shares no tensor with it: same structure and shapes, random numbers, on the CPU."""

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_TABLES = {
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip
_LEFT_BEHIND = {"_hf_hook", "_old_forward", "_compiled_call_impl"}
"""What other packages hang on an instance to move, wrap or compile its forward."""

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Children of wrappers that compile, recompute and shard; what they wrap stands in the copy instead of them."""


def random_copy(
    module: nn.Module,
    generator: torch.Generator,
    *,
    gain: float,
    bias: float,
    stubs: Mapping[int, nn.Module] | None = None,
    ints: Mapping[int, int] | None = None,
    experts: int = 0,
) -> nn.Module:
    """Copy `module` without its numbers.

    Args:
        module: on any device, the meta device included; none of its tensors is read but those of integers.
        generator: the only source of randomness, on the CPU.
        gain: standard deviation of what a matrix makes of inputs of variance 1.
        bias: vectors (biases, norms) are uniform in [0, bias].
        stubs: id of a submodule → what stands in its place.
        ints: value of an integer attribute → value it has in the copy.
        experts: number of experts; a table of experts by token gets random ones below it.
    """
    made: dict[int, Any] = dict(stubs or {})

    def tensor(old: Tensor) -> Tensor:
        if id(old) not in made:
            made[id(old)] = _random(old, generator, gain, bias, experts)
        found: Tensor = made[id(old)]
        return found

    def copy(old: nn.Module) -> nn.Module:
        if id(old) in made:
            known: nn.Module = made[id(old)]
            return known
        for wrapped in _WRAPPERS:
            if wrapped in old._modules:
                return copy(old.get_submodule(wrapped))
        # Not the class's own __new__: that of a sharded module constructs an unsharded one.
        new = made[id(old)] = object.__new__(type(old))
        state = new.__dict__
        for name, value in vars(old).items():
            if name in _LEFT_BEHIND:
                continue
            if name in _TABLES:
                state[name] = type(value)()
            elif isinstance(value, types.MethodType) and value.__self__ is old:
                state[name] = types.MethodType(value.__func__, new)
            elif name == "forward":
                continue  # wrapped by somebody; the class has the plain one
            elif isinstance(value, Tensor):
                state[name] = tensor(value)
            elif type(value) is int and ints is not None and value in ints:
                state[name] = ints[value]
            elif isinstance(value, (dict, list, set)):
                state[name] = value.copy()
            else:
                state[name] = value
        state["_parameters"] = {
            name: None if value is None else nn.Parameter(tensor(value), requires_grad=False)
            for name, value in old._parameters.items()
        }
        state["_buffers"] = {
            name: None if value is None else tensor(value) for name, value in old._buffers.items()
        }
        state["_modules"] = {
            name: None if value is None else copy(value) for name, value in old._modules.items()
        }
        return new

    return copy(module)


def _random(old: Tensor, generator: torch.Generator, gain: float, bias: float, experts: int) -> Tensor:
    shape = tuple(old.shape)
    if old.dtype in (torch.int64, torch.int32) and len(shape) == 2 and 1 <= shape[1] <= experts < shape[0]:
        order = torch.rand(shape[0], experts, generator=generator).argsort(dim=-1)
        return order[:, : shape[1]].to(old.dtype)
    if not old.is_floating_point():
        return torch.zeros(shape, dtype=old.dtype) if old.is_meta else old.detach().to("cpu", copy=True)
    values = torch.empty(shape, dtype=torch.float32)
    if len(shape) > 1 and min(shape) > 1:
        return values.normal_(0.0, gain / shape[-1] ** 0.5, generator=generator)
    return values.uniform_(0.0, bias, generator=generator)
