"""A draft spec for a module without a derived boundary, from its forward signature."""

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
    return f"{name}({', '.join(str(each.replace(annotation=each.empty)) for each in parameters)})"


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
