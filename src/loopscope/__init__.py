"""loopscope: watch the training of looped Mixture-of-Experts transformers, and of any other MoE.

The public names live here and are loaded on first use, so that ``import loopscope`` needs no torch.
"""

from importlib import import_module
from typing import Any

from loopscope import errors as errors

__version__ = "0.1.0"

# name → module. One line per public name; tests/test_public_names.py holds the reviewed list. Exceptions are in
# `loopscope.errors`, further questions to a run in `loopscope.analysis`, constants of a trace in `loopscope.trace`.
_PUBLIC = {
    "ACTIVE_TRACE_SINK": "loopscope.trace",
    "AlertConfig": "loopscope.alerts",
    "AlertSettings": "loopscope.alerts",
    "LoopTraceCollector": "loopscope.trace",
    "Loopscope": "loopscope.session",
    "LoopscopeError": "loopscope.errors",
    "LossComponents": "loopscope.trace",
    "ParquetCollector": "loopscope.collect",
    "RowContext": "loopscope.collect",
    "RowWriter": "loopscope.collect",
    "Run": "loopscope.analysis",
    "TraceMeta": "loopscope.trace",
    "TracePoint": "loopscope.trace",
    "TraceSink": "loopscope.trace",
    "VisitSpec": "loopscope.trace",
    "assert_trace_released": "loopscope.trace",
    "attach": "loopscope.session.attach",
    "discover": "loopscope.capture.discover",
    "legacy_trace_point_factory": "loopscope.trace",
    "open_run": "loopscope.analysis",
    "open_runs": "loopscope.analysis",
    "reduce_trace": "loopscope.collect",
    "run_probe_forward": "loopscope.trace",
    "unrolled_position": "loopscope.trace",
    "watch_trace": "loopscope.trace",
}
# Found under their old place as well, since scripts that are already written use them.
_ALIASES = {"findings": "loopscope.analysis"}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name) or _ALIASES.get(name)
    if module is None:
        raise AttributeError(f"module 'loopscope' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
