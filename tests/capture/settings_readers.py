"""Which settings the modules of each backend read, from their source: what the support table is compared with."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

_ATTACH = ("loopscope.session.attach", "loopscope.session.attached", "loopscope.capture.runtime")

READERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torchtitan": (
            "loopscope.integrations.torchtitan.moe_adapter",
            "loopscope.integrations.torchtitan.checks",
            "loopscope.capture.runtime",
        ),
        "torch": (*_ATTACH, "loopscope.capture.torch_adapter"),
        "transformers": (*_ATTACH, "loopscope.capture.transformers_adapter"),
        "mlx": (*_ATTACH, "loopscope.capture.mlx_adapter"),
    }
)
"""Backend → the modules through which it reads settings: the adapter and its helpers."""

_CARRIERS = ("settings", "config", "options")


def fields_read(source: str, names: Iterable[str]) -> frozenset[str]:
    """Fields of a configuration that Python source reads: ``settings.name``, ``self.config.name`` and the like."""
    known, found = set(names), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in known:
            owner = node.value
            last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if last.lstrip("_") in _CARRIERS:
                found.add(node.attr)
    return frozenset(found)


def fields_read_by(modules: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """The union over modules, found without importing the last part of each name."""
    names = tuple(names)
    found: frozenset[str] = frozenset()
    for module in modules:
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise LookupError(f"module {module} is listed as a reader of settings but does not exist")
        found |= fields_read(Path(spec.origin).read_text(encoding="utf-8"), names)
    return found
