"""Observing models that were not written for loopscope: registry, support table, capabilities, capture plan.

Everything here is free of side effects until something is attached: no model runs, no tensor is allocated, no file
is opened, and no framework is imported that was not asked for.
"""

from importlib import import_module
from typing import Any

# name → module, loaded on use: most of this package needs no torch.
_PUBLIC = {
    "Adapter": "adapter",
    "CapabilitySet": "capabilities",
    "Capture": "override",
    "CapturePlan": "spec",
    "CaptureSpec": "spec",
    "CoverageError": "errors",
    "PlanError": "errors",
    "ReconcileError": "errors",
    "Requirement": "requirements",
    "RoutingSpec": "routing",
    "RunSettings": "settings",
    "SupportEntry": "support",
    "check_config": "support",
    "decoder": "source",
    "dump_plan": "files",
    "load_overrides": "files",
    "method_boundary": "methods",
    "reconcile": "proof",
    "reducer": "reducers",
    "resolve_adapter": "registry",
    "resolve_plan": "plan",
    "synthesize": "capabilities",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
