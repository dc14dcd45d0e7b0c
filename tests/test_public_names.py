"""The reviewed list of public names. A change here is a change of what users may import."""

from __future__ import annotations

import pytest

import loopscope

PUBLIC = {
    "ACTIVE_TRACE_SINK",
    "AlertConfig",
    "AlertNotice",
    "AlertSettings",
    "CheckpointMismatchError",
    "ConfigError",
    "LOOP_AXIS_PROVENANCE",
    "LeakError",
    "LoopTraceCollector",
    "Loopscope",
    "LoopscopeError",
    "LossComponents",
    "MetricInputError",
    "NotARunError",
    "NullCollector",
    "ParquetCollector",
    "ProbeError",
    "ROUTER_LOGITS_ARE_PRESOFTMAX",
    "RunExistsError",
    "SchemaError",
    "StoreError",
    "TraceError",
    "TraceMeta",
    "TracePoint",
    "TraceSink",
    "UnsupportedError",
    "VisitSpec",
    "__version__",
    "assert_trace_released",
    "attach",
    "compare_probes",
    "differences",
    "expert_deaths",
    "findings",
    "layer_load",
    "legacy_trace_point_factory",
    "open_run",
    "open_runs",
    "reduce_trace",
    "run_probe_forward",
    "scope_of",
    "settings_between",
    "unrolled_position",
    "watch_trace",
    "window_of",
}


def test_the_list_is_the_reviewed_one() -> None:
    assert set(loopscope.__all__) == PUBLIC
    assert set(dir(loopscope)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_can_be_imported(name: str) -> None:
    assert getattr(loopscope, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loopscope.nothing
