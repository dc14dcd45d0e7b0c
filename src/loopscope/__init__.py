"""loopscope: watch the training of looped Mixture-of-Experts transformers, and of any other MoE.

The public names live here and are loaded on first use, so that ``import loopscope`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# name → module. One line per public name; tests/test_public_names.py holds the reviewed list.
_PUBLIC = {
    "ACTIVE_TRACE_SINK": "loopscope.trace",
    "AlertConfig": "loopscope.alerts",
    "AlertNotice": "loopscope.alerts",
    "AlertSettings": "loopscope.alerts",
    "CheckpointMismatchError": "loopscope.errors",
    "ConfigError": "loopscope.errors",
    "LOOP_AXIS_PROVENANCE": "loopscope.trace",
    "LeakError": "loopscope.errors",
    "LoopTraceCollector": "loopscope.trace",
    "Loopscope": "loopscope.session",
    "LoopscopeError": "loopscope.errors",
    "LossComponents": "loopscope.trace",
    "MetricInputError": "loopscope.errors",
    "NotARunError": "loopscope.errors",
    "NullCollector": "loopscope.trace",
    "ParquetCollector": "loopscope.collect",
    "ProbeError": "loopscope.errors",
    "ROUTER_LOGITS_ARE_PRESOFTMAX": "loopscope.trace",
    "RunExistsError": "loopscope.errors",
    "SchemaError": "loopscope.errors",
    "StoreError": "loopscope.errors",
    "TraceError": "loopscope.errors",
    "TraceMeta": "loopscope.trace",
    "TracePoint": "loopscope.trace",
    "TraceSink": "loopscope.trace",
    "UnsupportedError": "loopscope.errors",
    "VisitSpec": "loopscope.trace",
    "attach": "loopscope.session.attach",
    "assert_trace_released": "loopscope.trace",
    "compare_probes": "loopscope.analysis",
    "differences": "loopscope.analysis",
    "expert_deaths": "loopscope.analysis",
    "findings": "loopscope.analysis",
    "layer_load": "loopscope.analysis",
    "legacy_trace_point_factory": "loopscope.trace",
    "open_run": "loopscope.analysis",
    "open_runs": "loopscope.analysis",
    "reduce_trace": "loopscope.collect",
    "run_probe_forward": "loopscope.trace",
    "scope_of": "loopscope.analysis",
    "settings_between": "loopscope.analysis",
    "unrolled_position": "loopscope.trace",
    "watch_trace": "loopscope.trace",
    "window_of": "loopscope.analysis",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'loopscope' has no attribute {name!r}") from None
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
