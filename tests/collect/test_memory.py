import doctest

from collect_helpers import meta, sink, specs
from test_collector import collector

from loopscope.collect import memory, planned_trace_bytes


def test_the_plan_equals_what_a_trace_measures():
    writer, made = collector()
    made.on_trace_step(1, sink(batch=3, seq=7, width=6), meta())
    planned = planned_trace_bytes(specs(), batch=3, sequence=7, width=6, residual_bytes=4)
    assert writer.rows("health", event="trace_bytes")[0]["value"] == planned


def test_example():
    assert doctest.testmod(memory).failed == 0
