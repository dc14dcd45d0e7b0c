"""The contract between a model and the metrics: raw detached tensors per visit, keyed by unrolled depth."""

from loopscope.trace.collector import LoopTraceCollector, NullCollector
from loopscope.trace.leak import TraceWatch, assert_trace_released, watch_trace
from loopscope.trace.legacy import legacy_trace_point_factory
from loopscope.trace.point import (
    ACCEPTED_LOOP_AXIS_PROVENANCES,
    LOOP_AXIS_PROVENANCE,
    ROUTER_FIELDS,
    ROUTER_LOGITS_ARE_PRESOFTMAX,
    TENSOR_FIELDS,
    LossComponents,
    TraceMeta,
    TracePoint,
    VisitSpec,
    unrolled_position,
)
from loopscope.trace.probe import raised_in_probe_forward, run_probe_forward
from loopscope.trace.sink import (
    ACTIVE_TRACE_SINK,
    ActiveTraceSink,
    OnError,
    StreamingWindow,
    TraceSink,
    TraceWindow,
)

__all__ = [
    "ACCEPTED_LOOP_AXIS_PROVENANCES",
    "ACTIVE_TRACE_SINK",
    "LOOP_AXIS_PROVENANCE",
    "ROUTER_FIELDS",
    "ROUTER_LOGITS_ARE_PRESOFTMAX",
    "TENSOR_FIELDS",
    "ActiveTraceSink",
    "LoopTraceCollector",
    "LossComponents",
    "NullCollector",
    "OnError",
    "StreamingWindow",
    "TraceMeta",
    "TracePoint",
    "TraceSink",
    "TraceWatch",
    "TraceWindow",
    "VisitSpec",
    "assert_trace_released",
    "legacy_trace_point_factory",
    "raised_in_probe_forward",
    "run_probe_forward",
    "unrolled_position",
    "watch_trace",
]
