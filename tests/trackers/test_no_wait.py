"""Trackers look at rows, which are on the host already: they never make the host wait for the device."""

import torch
from collect_helpers import meta, sink, specs
from test_pending_losses import device_loss
from test_tracking_writer import made
from test_transfers import counted
from tracker_helpers import Remembering

from loopscope import ParquetCollector
from loopscope.collect import RowContext


def waits(monkeypatch, writer):
    collector = ParquetCollector(
        writer, context=RowContext(run_id="r"), expected_visits=specs(layers=4, steps=4), on_error="raise"
    )
    torch.manual_seed(0)
    windows = [sink(specs(layers=4, steps=4)) for _ in range(3)]
    with counted(monkeypatch) as calls:
        for step in range(1, 10):
            if step % 3 == 0:
                collector.on_trace_step(step, windows.pop(), meta(steps=4, layers=4))
            collector.submit_loss(step, device_loss(grad_norm=0.5))
        collector.close()
    return calls


def test_as_often_as_without_trackers(monkeypatch):
    tracker = Remembering()
    inner, tracking = made(tracker, on_error="raise", keys={"aggregation_scope": "rank_local"})
    without = waits(monkeypatch, type(inner)())
    assert waits(monkeypatch, tracking) == without
    assert without["cpu"] > 0
    assert len([values for values in tracker.steps if "moe/dead" in values.scalars]) == 3
    assert len([values for values in tracker.steps if "loss/task" in values.scalars]) == 9
