"""Which modules may be experts, by the shapes of what they hold; whether they are is seen when a copy runs."""

import re
from collections.abc import Mapping

import torch
from torch import nn

from loopscope.capture.fit.calls_experts import has_forward

# An adapter puts its own module around the one that it changes.
_ADAPTED = re.compile(r"(\.(base_layer|original_module|modules_to_save\.[^.]+))+$")


def expert_modules(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Name → number of experts, for modules that may be experts: in one parameter per matrix, whose first dimension
    counts experts, in a container with a forward of its own, or in a module that says how many it has.

    Of a module and the adapters around it, the outermost is named.
    """
    found: dict[str, int] = {}
    for name, module in modules.items():
        if size := _stacked(module) or _contained(module) or _listed(name, module, modules):
            found.setdefault(_ADAPTED.sub("", name), size)
    if not found:
        for name, module in modules.items():
            if size := _said(module):
                found[name] = size
        found = {
            name: size for name, size in found.items() if not any(n.startswith(f"{name}.") for n in found)
        }
    return found


def _stacked(module: nn.Module) -> int:
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0
    held = [*module._parameters.values(), *module._buffers.values()]
    sizes = {tensor.shape[0] for tensor in held if isinstance(tensor, torch.Tensor) and tensor.ndim >= 3}
    # Experts that compute nothing may be counted in one matrix and not in the other.
    return min(sizes) if sizes and min(sizes) > 1 else 0


def _contained(module: nn.Module) -> int:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not has_forward(module):
        return 0
    return _alike(module)


def _listed(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> int:
    """A plain list of as many alike modules as a matrix beside it has rows; layers have none beside them."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict) or not (size := _alike(module)):
        return 0
    around = modules.get(name.rpartition(".")[0])
    beside = [child for child in around.children() if child is not module] if around is not None else []
    held = [tensor for child in beside for tensor in child.parameters() if tensor.ndim == 2]
    return size if any(tensor.shape[0] == size for tensor in held) else 0


def _alike(module: nn.Module) -> int:
    children = list(module.children())
    if len({type(child) for child in children}) != 1 or not any(True for _ in children[0].parameters()):
        return 0
    return len(children) if len(children) > 1 else 0


def _said(module: nn.Module) -> int:
    size = getattr(module, "num_experts", None)
    if type(size) is not int or size < 2:
        return 0
    held = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    return size if any(tensor.shape[0] > size and tensor.shape[0] % size == 0 for tensor in held) else 0
