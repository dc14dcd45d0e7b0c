"""What a source named, made into a plain tensor of this rank: without graph, subclass, sharding or raggedness."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from loopscope.capture.errors import ReconcileError


def plain_tensor(value: Any, name: str) -> Tensor:
    """A dense, detached `torch.Tensor` with this rank's values.

    A nested tensor gives its values one behind the other, [T, ...]. A DTensor gives its local part.

    Args:
        value: what the source named.
        name: of the tensor, for messages.

    Raises:
        ReconcileError: no tensor; a tensor without values (meta, sparse); a DTensor whose local part is a partial sum
            or a piece of the features.
    """
    if isinstance(value, (tuple, list)):
        raise ReconcileError(
            f"{name} is a {type(value).__name__} of {len(value)}, expected a tensor; add [index]"
        )
    if isinstance(value, dict):
        raise ReconcileError(
            f"{name} is a dict with keys {sorted(map(str, value))}, expected a tensor; add .key or [key]"
        )
    if not isinstance(value, Tensor):
        raise ReconcileError(f"{name} is {type(value).__name__}, expected a tensor")
    found: Tensor = value
    if hasattr(found, "to_local") and hasattr(found, "placements"):
        _check_placements(found, name)
        found = found.to_local()
    found = found.detach()
    if found.is_nested:
        found = found.values() if found.layout is torch.jagged else torch.cat(list(found.unbind()))
    if found.layout is not torch.strided:
        raise ReconcileError(
            f"{name} is {found.layout}, expected a dense tensor; add a decoder that makes it one"
        )
    if type(found) is not Tensor:
        found = found.as_subclass(Tensor)
    if found.device.type == "meta":
        raise ReconcileError(
            f"{name} is on the meta device, so it has no values: the model was built without weights, or they are "
            "offloaded by something else than accelerate. Load the weights, or keep this module on its device"
        )
    return found


def offloaded(owners: list[tuple[Any, str]]) -> Tensor | None:
    """The values of a parameter or buffer that accelerate moved to the host or to disk, from its hook's own map.

    Args:
        owners: (module, dotted name within it), outermost first.
    """
    for module, name in reversed(owners):
        for hook in _hooks(getattr(module, "_hf_hook", None)):
            values = getattr(hook, "weights_map", None)
            if values is not None:
                try:
                    return values[name]  # type: ignore[no-any-return]
                except KeyError:
                    continue
    return None


def _hooks(hook: Any) -> Iterator[Any]:
    if hook is not None:
        yield hook
        for inner in getattr(hook, "hooks", ()):
            yield from _hooks(inner)


def _check_placements(value: Any, name: str) -> None:
    for placement in value.placements:
        if placement.is_partial():
            raise ReconcileError(
                f"{name} is a DTensor of partial sums ({placement}), expected whole values. Name the tensor behind the "
                "reduction"
            )
        if placement.is_shard() and placement.dim % value.ndim == value.ndim - 1 and value.ndim > 1:
            raise ReconcileError(
                f"{name} is a DTensor whose last dimension is sharded ({placement}), expected every feature (or "
                "expert) of a token on one rank. Name the tensor where it is gathered"
            )
