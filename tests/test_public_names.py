"""The reviewed list of public names. A change here is a change of what users may import."""

from __future__ import annotations

from importlib import import_module

import pytest

import loopscope

PUBLIC = {
    "ACTIVE_TRACE_SINK",
    "AlertConfig",
    "AlertSettings",
    "LoopTraceCollector",
    "Loopscope",
    "LoopscopeError",
    "LossComponents",
    "ParquetCollector",
    "RowContext",
    "RowWriter",
    "Run",
    "TraceMeta",
    "TracePoint",
    "TraceSink",
    "VisitSpec",
    "__version__",
    "assert_trace_released",
    "attach",
    "discover",
    "legacy_trace_point_factory",
    "open_run",
    "open_runs",
    "reduce_trace",
    "run_probe_forward",
    "unrolled_position",
    "watch_trace",
}

# Questions to a run.
ANALYSIS = {
    "Run",
    "Runs",
    "compare_probes",
    "differences",
    "expert_deaths",
    "findings",
    "layer_load",
    "open_run",
    "open_runs",
    "require_same_corpus",
    "scope_of",
    "settings_between",
    "window_of",
}

# Not public any more, and still found: scripts that are already written use them.
ALIASES = {"findings": "loopscope.analysis"}


def test_the_list_is_the_reviewed_one() -> None:
    assert set(loopscope.__all__) == PUBLIC
    assert set(dir(loopscope)) == PUBLIC
    assert set(import_module("loopscope.analysis").__all__) == ANALYSIS


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_can_be_imported(name: str) -> None:
    assert getattr(loopscope, name) is not None


@pytest.mark.parametrize(("name", "module"), ALIASES.items())
def test_an_alias_is_what_its_module_has(name: str, module: str) -> None:
    assert getattr(loopscope, name) is getattr(import_module(module), name)
    assert name not in PUBLIC


def test_no_exception_but_the_base_is_public() -> None:
    errors = import_module("loopscope.errors")
    assert {name for name in PUBLIC if hasattr(errors, name)} - {"__version__"} == {"LoopscopeError"}
    with pytest.raises(AttributeError, match="no attribute 'ConfigError'"):
        _ = loopscope.ConfigError


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loopscope.nothing
