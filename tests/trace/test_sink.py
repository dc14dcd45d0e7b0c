import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_helpers import make_point

from loopscope.errors import TraceError
from loopscope.trace import ActiveTraceSink, LoopTraceCollector, NullCollector
from loopscope.trace.sink import ACTIVE_TRACE_SINK


def test_one_window_keeps_points_by_depth():
    sink = ActiveTraceSink()
    window = sink.arm()
    points = [make_point(position) for position in (2, 0, 1)]
    for point in points:
        sink.record(point)
    assert window == {2: points[0], 0: points[1], 1: points[2]}
    assert sink.disarm() is window
    assert not sink.armed


def test_without_a_window_points_are_dropped():
    sink = ActiveTraceSink()
    sink.record(make_point())
    assert sink.disarm() is None
    assert sink.arm() == {}


def test_arming_twice_raises_and_keeps_the_open_window():
    sink = ActiveTraceSink()
    window = sink.arm()
    sink.record(make_point())
    with pytest.raises(TraceError, match="already armed and holds 1 visit"):
        sink.arm()
    assert sink.disarm() is window
    assert len(window) == 1


@pytest.mark.parametrize("on_error", ["record", "raise"])
def test_a_position_recorded_twice(on_error):
    sink = ActiveTraceSink()
    window = sink.arm()
    first = make_point(3, block="head")
    sink.record(first)
    sink.record(make_point(3))  # never raises: it runs inside the model's forward
    if on_error == "record":
        assert sink.disarm(on_error="record")[3] is first
        assert len(window.faults) == 1
        assert "unrolled_pos 3" in window.faults[0]
        assert "head[" in window.faults[0]
        assert "loop[" in window.faults[0]
    else:
        with pytest.raises(TraceError, match=r"unrolled_pos 3.*head\[.*loop\["):
            sink.disarm(on_error="raise")
        assert window == {}  # nothing is kept alive by the error
    assert not sink.armed


def test_the_same_object_recorded_twice_is_no_fault():
    sink, point = ActiveTraceSink(), make_point()
    sink.arm()
    sink.record(point)
    sink.record(point)
    assert sink.disarm().faults == []


@given(st.lists(st.sampled_from(["arm", "record", "disarm"]), max_size=30))
def test_record_never_raises_and_faults_count_repeats(actions):
    sink, armed, recorded, points = ActiveTraceSink(), False, 0, iter(range(100))
    point = make_point()
    for action in actions:
        if action == "arm" and not armed:
            sink.arm()
            armed, recorded = True, 0
        elif action == "record":
            sink.record(make_point(7, residual=point.residual, loop_step=next(points)))
            recorded += armed
        elif action == "disarm":
            window = sink.disarm()
            assert (window is not None) == armed
            if window is not None:
                assert len(window.faults) == max(0, recorded - 1)
            armed = False


def test_there_is_one_sink_per_process():
    import loopscope

    assert loopscope.ACTIVE_TRACE_SINK is ACTIVE_TRACE_SINK


def test_the_protocol_is_checkable_at_run_time():
    class Partial:
        def on_metrics_step(self, step, loss, grad_norm=None, lr=None):
            return {}

    assert isinstance(NullCollector(), LoopTraceCollector)
    assert not isinstance(Partial(), LoopTraceCollector)
