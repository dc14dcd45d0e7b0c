"""A probe whose visits are reduced as they happen gives the rows of one that keeps its trace."""

import gc
import weakref

import numpy as np
import pytest
import torch
from collect_helpers import meta, point, sink, specs, split
from test_collector import collector

from loopscope.collect.probe_stream import ProbeWindow
from loopscope.errors import MetricInputError
from loopscope.trace import ACTIVE_TRACE_SINK

PROBE_TABLES = ("probe_router", "probe_overlap", "probe_loss", "health")
CLOCK = {"elapsed_s", "wall_time"}


def rows(writer):
    return {
        table: [{k: v for k, v in row.items() if k not in CLOCK} for row in writer.tables[table]]
        for table in PROBE_TABLES
    }


def streamed(made, windows):
    window = made.probe_window()
    for part in windows:
        window.begin_forward()
        ACTIVE_TRACE_SINK.arm(window)
        for _, visit in sorted(part.items()):
            ACTIVE_TRACE_SINK.record(visit)
        assert ACTIVE_TRACE_SINK.disarm() is window
    return window


@pytest.mark.parametrize("parts", [1, 2])
def test_the_same_rows_as_with_the_plain_sink(parts):
    losses = torch.rand(2, 5)
    plain_writer, plain = collector("raise")
    plain.on_probe_step(3, sink(), meta(), losses)
    writer, made = collector("raise")
    made.on_probe_step(3, streamed(made, split(sink(), parts)), meta(), losses)
    expected, found = rows(plain_writer), rows(writer)
    for table in PROBE_TABLES:
        assert len(found[table]) == len(expected[table]) > 0
        for one, other in zip(found[table], expected[table], strict=True):
            assert one.keys() == other.keys()
            for name, value in other.items():
                if isinstance(value, float) or (isinstance(value, list) and isinstance(value[0], float)):
                    np.testing.assert_allclose(one[name], value, rtol=1e-6, err_msg=f"{table}.{name}")
                else:
                    assert one[name] == value, (table, name)


def test_nothing_of_a_visit_is_kept():
    gc.collect()
    gc.disable()
    try:
        window = ProbeWindow(isolate=False)
        for spec in specs():
            visit = point(spec)
            alive = [weakref.ref(tensor) for tensor in visit.tensors().values()]
            window.take(visit)
            del visit
            assert not [one for one in alive if one() is not None]
    finally:
        gc.enable()
    assert len(window) == 0
    assert window.visits == len(specs())


def test_overlap_rows_are_every_pair_of_loop_steps_of_every_layer():
    writer, made = collector()
    made.on_probe_step(0, sink(), meta(), torch.zeros(2, 5))
    found = writer.tables["probe_overlap"]
    keys = [(row["layer_idx"], row["from_loop_step"], row["to_loop_step"]) for row in found]
    assert sorted(keys) == [(layer, *pair) for layer in (0, 1) for pair in ((0, 1), (0, 2), (1, 2))]
    assert {row["num_tokens"] for row in found} == {10}
    assert {row["num_loop_steps"] for row in found} == {3}


def test_a_broken_visit_costs_its_own_rows():
    writer, made = collector("record")
    window = sink()
    window[3].topk_idx[0, 0, 0] = 99
    made.on_probe_step(0, streamed(made, [window]), meta(), torch.zeros(2, 5))
    broken = [row for row in writer.tables["probe_overlap"] if row["topk_overlap"] is None]
    assert {(row["layer_idx"], row["from_loop_step"], row["to_loop_step"]) for row in broken} == {
        (0, 0, 1),
        (0, 1, 2),
    }
    assert all("failed" in row["null_reasons"] for row in broken)
    assert len(writer.tables["probe_overlap"]) == 6


def test_what_a_visit_raises_leaves_after_the_forward():
    _, made = collector("raise")
    window = sink()
    window[3] = point(specs()[3], idx=torch.zeros(2, 5, 3, dtype=torch.int64))
    stream = streamed(made, [window])
    assert isinstance(stream.error, MetricInputError)
    assert stream.error.__traceback__ is None


def test_a_position_recorded_twice_is_a_fault_and_counts_once():
    writer, made = collector("record")
    window = made.probe_window()
    for _ in range(2):
        window.begin_forward()
        for _, visit in sorted(sink().items()):
            window.take(visit)
            window.take(visit)
    assert len(window.faults) == len(specs())
    made.on_probe_step(0, window, meta(), torch.zeros(2, 5))
    assert len(writer.rows("health", event="sink_fault")) == len(specs())


def test_a_loss_that_is_not_finite_is_null_and_counted():
    writer, made = collector("raise")
    losses = torch.ones(2, 5)
    losses[1, 2] = float("nan")
    headline = made.on_probe_step(0, sink(), meta(), losses)
    assert "probe/loss" not in headline
    by_stratum = {row["stratum"]: row["loss_mean"] for row in writer.tables["probe_loss"]}
    assert by_stratum == {"all": None, "low": 1.0, "high": None}
    (event,) = writer.rows("health", event="nonfinite_probe_loss")
    assert event["count"] == 1
