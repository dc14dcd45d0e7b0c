"""Nothing of a trace outlives a callback, with the garbage collector off."""

import gc
import weakref

import pytest
import torch
from collect_helpers import meta, point, sink, specs, split
from torch.multiprocessing.reductions import StorageWeakRef

from loopscope import ParquetCollector, watch_trace
from loopscope.collect import MemoryWriter, ProbeCorpus, RowContext


@pytest.fixture(autouse=True)
def _no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _collector(on_error="record"):
    return ParquetCollector(
        MemoryWriter(),
        context=RowContext(run_id="r"),
        expected_visits=specs(),
        on_error=on_error,
        corpus=ProbeCorpus(name="c", hash="h"),
    )


def _watch(window):
    objects = [weakref.ref(t) for p in window.values() for t in p.tensors().values()]
    storages = [StorageWeakRef(t.untyped_storage()) for p in window.values() for t in p.tensors().values()]
    return objects, storages


def _assert_gone(objects, storages):
    assert not [ref for ref in objects if ref() is not None]
    assert all(ref.expired() for ref in storages)


def test_between_and_after_microbatches():
    made = _collector("raise")
    for number in range(3):
        window = sink(seed=number)
        watched, watch = _watch(window), watch_trace(window)
        made.on_trace_step(1, window, meta(), microbatch=number, num_microbatches=3)
        window.clear()
        watch.assert_released(storages=True)
        _assert_gone(*watched)


def test_after_a_probe():
    made = _collector("raise")
    window, losses = sink(), torch.rand(2, 5)
    watched, alive = _watch(window), StorageWeakRef(losses.untyped_storage())
    made.on_probe_step(1, window, meta(), losses)
    window.clear()
    del losses
    _assert_gone(*watched)
    assert alive.expired()


def test_after_an_error_that_was_recorded():
    made = _collector("record")
    window = sink()
    window[3] = point(specs()[3], idx=torch.zeros(2, 5, 3, dtype=torch.int64))
    watched = _watch(window)
    made.on_trace_step(1, window, meta())
    window.clear()
    assert made.errors > 0
    _assert_gone(*watched)


def test_after_a_callback_that_failed_as_a_whole():
    made = _collector("record")
    window = split(sink(), 2)[0]
    watched = _watch(window)
    made.on_trace_step(1, window, meta(), microbatch=1, num_microbatches=2)
    window.clear()
    assert made.errors == 1
    _assert_gone(*watched)


def test_with_a_mask():
    made = _collector("raise")
    window, valid = sink(), torch.ones(2, 5, dtype=torch.bool)
    watched, alive = _watch(window), StorageWeakRef(valid.untyped_storage())
    made.on_trace_step(1, window, meta(), valid=valid)
    window.clear()
    del valid
    _assert_gone(*watched)
    assert alive.expired()
