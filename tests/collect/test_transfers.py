"""How often loopscope makes the host wait for the device, counted by a test double."""

from contextlib import contextmanager

import pytest
import torch
from collect_helpers import meta, sink, specs, split
from rank_helpers import ranks
from test_pending_losses import SlowReducer, device_loss

from loopscope import ParquetCollector
from loopscope.collect import MemoryWriter, ProbeCorpus, RowContext
from loopscope.collect.pending_losses import PendingLosses

WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")


@contextmanager
def counted(monkeypatch):
    """Method name → calls on any tensor while the block runs."""
    calls = dict.fromkeys(WAITS, 0)
    with monkeypatch.context() as patch:
        for name in WAITS:
            real = getattr(torch.Tensor, name)

            def watched(self, *args, _name=name, _real=real, **kwargs):
                calls[_name] += 1
                return _real(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, watched)
        yield calls


def _collector():
    return ParquetCollector(
        MemoryWriter(),
        context=RowContext(run_id="r"),
        expected_visits=specs(layers=4, steps=4),
        on_error="raise",
        corpus=ProbeCorpus(name="tiny", hash="abc"),
    )


def test_one_transfer_per_traced_step_whatever_the_depth(monkeypatch):
    made, window = _collector(), sink(specs(layers=4, steps=4), batch=4)
    parts = split(window, 2)
    with counted(monkeypatch) as calls:
        made.on_trace_step(1, parts[0], meta(steps=4, layers=4), microbatch=0, num_microbatches=2)
    assert not any(calls.values()), calls
    with counted(monkeypatch) as calls:
        made.on_trace_step(1, parts[1], meta(steps=4, layers=4), microbatch=1, num_microbatches=2)
    assert calls.pop("cpu") == 1
    assert calls.pop("numpy") == 1  # of the copy that is on the host already
    assert not any(calls.values()), calls


def test_one_transfer_per_probe(monkeypatch):
    made, window = _collector(), sink(specs(layers=4, steps=4))
    losses = torch.rand(2, 5)
    with counted(monkeypatch) as calls:
        made.on_probe_step(1, window, meta(steps=4, layers=4), losses)
    assert calls["cpu"] == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_across_ranks_the_writer_alone_transfers(monkeypatch, rank):
    _, made, _ = ranks(2)
    if rank == 0:
        made[1].on_trace_step(1, sink(), meta())
    window = sink()
    with counted(monkeypatch) as calls:
        made[rank].on_trace_step(1, window, meta())
    assert calls["cpu"] == (1 if rank == 0 else 0)
    assert calls["item"] == 0


def test_a_loss_that_is_submitted_is_not_waited_for(monkeypatch):
    ring, loss = PendingLosses(SlowReducer()), device_loss(grad_norm=0.5)
    with counted(monkeypatch) as calls:
        ring.submit(1, loss)
        assert list(ring.drain()) == []
    assert not any(calls.values()), calls
