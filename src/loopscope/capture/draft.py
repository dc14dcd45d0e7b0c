"""A draft of the contract of a boundary that nobody derived, from its module's own signature."""

from __future__ import annotations

import inspect
from typing import Any


def signature_of(module: Any) -> str:
    """``forward(x, mask=None)``, as text; mlx modules have ``__call__`` instead."""
    kind = type(module)
    name = "forward" if callable(getattr(kind, "forward", None)) else "__call__"
    try:
        parameters = list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
    except (TypeError, ValueError):
        return f"{name}(...)"
    return f"{name}({', '.join(_short(parameter) for parameter in parameters)})"


def draft_spec(name: str, module: Any) -> str:
    """YAML that can be completed and pasted into the plan."""
    return "\n".join(
        (
            f"{name}:  # {type(module).__name__}.{signature_of(module)}",
            "  tensors: {residual: 'output'}  # for a router: router_logits, topk_idx and a `routing`",
            "  placements: {}",
            "  merge: sum",
        )
    )


def _short(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return (
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
    )
