import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_helpers import META, ForeignModel, ids, make_point

from loopscope.errors import LeakError
from loopscope.trace import (
    ACTIVE_TRACE_SINK,
    TENSOR_FIELDS,
    assert_trace_released,
    run_probe_forward,
    watch_trace,
)
from loopscope.trace.collector import NullCollector


@pytest.fixture(autouse=True)
def _few_objects():
    """The search for holders walks all objects; here only those of the test."""
    gc.freeze()
    yield
    gc.unfreeze()


def fail_with(point):
    raise ValueError("a metric failed")


def keep_exception(point):
    try:
        fail_with(point)
    except ValueError as error:
        return error


def keep_closure(point):
    logits = point.router_logits
    return lambda: logits.shape


# kind → (what is kept of a point, seen at the object level already)
KINDS = {
    "tensor": (lambda p: p.router_logits, True),
    "point": (lambda p: p, True),
    "tensors dict": (lambda p: p.tensors(), True),
    "closure": (keep_closure, True),
    "graph": (lambda p: p.router_logits.requires_grad_().exp(), True),
    "graph of a product": (lambda p: p.router_logits * torch.ones((), requires_grad=True), True),
    "exception": (keep_exception, True),
    "view": (lambda p: p.router_logits.view(-1), False),
    "slice": (lambda p: p.router_logits[0, 0], False),
    "detach": (lambda p: p.router_logits.detach(), False),
    "data": (lambda p: p.router_logits.data, False),
    "numpy": (lambda p: p.router_logits.numpy(), False),
    "memoryview": (lambda p: memoryview(p.router_logits.numpy()), False),
    "untyped-storage": (lambda p: p.router_logits.untyped_storage(), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_leak_is_named(kind):
    retain, at_object_level = KINDS[kind]
    sink = {position: make_point(position) for position in range(3)}
    watch = watch_trace(sink)
    kept = [retain(sink[1])]
    sink.clear()
    if at_object_level:
        with pytest.raises(LeakError, match=r"unrolled_pos 1|carries a graph"):
            watch.assert_released(storages=False)
    if kind != "graph of a product":
        with pytest.raises(LeakError, match=r"router_logits at unrolled_pos 1") as caught:
            watch.assert_released()
        assert "of 15 trace tensors outlived" in str(caught.value)
        assert "unrolled_pos 0" not in str(caught.value)
    kept.clear()
    watch.assert_released(storages=False)
    watch.assert_released()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "graph of a product"])
def test_the_one_shot_form_sees_every_kind_and_clears(kind):
    retain, _ = KINDS[kind]
    sink = {position: make_point(position) for position in range(2)}
    kept = [retain(sink[0])]
    with pytest.raises(LeakError, match="unrolled_pos 0"):
        assert_trace_released(sink)
    assert sink == {}
    assert len(kept) == 1


@pytest.mark.parametrize("field", ["router_probs", "topk_idx", "topk_weights", "residual"])
def test_the_field_is_named(field):
    sink = {4: make_point(4)}
    watch = watch_trace(sink)
    kept = getattr(sink[4], field).detach()
    sink.clear()
    with pytest.raises(LeakError, match=rf"1 of 5 trace tensors outlived the callback: {field} at"):
        watch.assert_released()
    del kept


@settings(max_examples=8, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 3), st.sampled_from(TENSOR_FIELDS[:5]))))
def test_exactly_what_is_kept_is_named(chosen):
    sink = {position: make_point(position) for position in range(4)}
    watch = watch_trace(sink)
    kept = [getattr(sink[position], field).detach() for position, field in chosen]
    sink.clear()
    if not chosen:
        watch.assert_released()
        return
    with pytest.raises(LeakError) as caught:
        watch.assert_released()
    assert f"{len(kept)} of 20 trace tensors" in str(caught.value)
    named = [f"{field} at unrolled_pos {position}" in str(caught.value) for position, field in chosen]
    assert sum(named) == min(len(chosen), 8)
    del kept


class Hoarder(NullCollector):
    def __init__(self):
        self.last_logits = None

    def on_trace_step(self, step, sink, meta, **_):
        self.last_logits = sink[0].router_logits
        return {}


def test_the_holder_is_named():
    collector, sink = Hoarder(), {0: make_point()}
    watch = watch_trace(sink)
    collector.on_trace_step(1, sink, META)
    sink.clear()
    with pytest.raises(LeakError, match=r"held by Hoarder\.last_logits"):
        watch.assert_released(storages=False)


def test_a_sink_that_was_not_cleared_is_named():
    ACTIVE_TRACE_SINK.arm()
    ACTIVE_TRACE_SINK.record(make_point(0))
    sink = ACTIVE_TRACE_SINK.disarm()
    watch = watch_trace(sink)
    with pytest.raises(LeakError, match=r"TracePoint\.router_logits < TraceWindow\[0\]"):
        watch.assert_released(storages=False)
    sink.clear()
    watch.assert_released()


def test_the_exceptions_frames_are_named():
    sink = {0: make_point()}
    watch = watch_trace(sink)
    kept = [keep_exception(sink[0])]
    sink.clear()
    with pytest.raises(LeakError, match=r"a local of fail_with.*exception ValueError"):
        watch.assert_released(storages=False)
    assert kept


def test_own_tensors_that_share_nothing_are_no_leak():
    sink = {0: make_point()}
    watch = watch_trace(sink)
    kept = [
        sink[0].router_logits.clone(),
        sink[0].router_logits.sum(),
        sink[0].residual.float().mean().item(),
    ]
    sink.clear()
    watch.assert_released(storages=False)
    watch.assert_released()
    assert kept


def test_neither_watch_nor_error_keeps_anything_alive():
    sink = {position: make_point(position) for position in range(3)}
    alive = [weakref.ref(point) for point in sink.values()]
    watch = watch_trace(sink)
    del sink[2]
    try:
        watch.assert_released()
    except LeakError as error:
        kept = error
    sink.clear()
    assert [reference() for reference in alive] == [None] * 3
    watch.assert_released()
    assert "unrolled_pos 0" in str(kept)


def test_cycles_are_leaks_where_the_collector_is_off():
    class Ring:
        pass

    sink = {0: make_point()}
    watch = watch_trace(sink)
    gc.disable()
    try:
        ring = Ring()
        ring.me, ring.kept = ring, sink[0].residual
        del ring
        sink.clear()
        with pytest.raises(LeakError, match="residual at unrolled_pos 0"):
            watch.assert_released(storages=False)
    finally:
        gc.enable()
    gc.collect()
    watch.assert_released()


def test_parameters_and_buffers_of_the_model_may_live_on():
    model = ForeignModel()

    def aliasing():
        return make_point(0, expert_bias=model.tokens, residual=model.emb.weight.detach())

    with pytest.raises(LeakError, match=r"expert_bias at unrolled_pos 0.*residual at unrolled_pos 0"):
        assert_trace_released({0: aliasing()})
    assert_trace_released({0: aliasing()}, model=model)
    # The exception is for the model's memory, not for whatever else the same point holds.
    sink = {0: aliasing()}
    kept = sink[0].router_probs
    with pytest.raises(LeakError, match=r"1 of 6.*router_probs"):
        assert_trace_released(sink, model=model)
    assert kept is not None


def test_a_graph_behind_a_tensor_that_was_recorded_with_its_graph():
    weight = torch.randn(5, 5, requires_grad=True)
    live = make_point().router_logits @ weight
    sink = {0: make_point(0, router_logits=live)}
    watch = watch_trace(sink)
    kept = live.sum()  # saves neither the logits nor their storage
    del live
    sink.clear()
    with pytest.raises(LeakError, match=r"carries a graph \(SumBackward0\)"):
        watch.assert_released()
    del kept
    watch.assert_released()


def test_training_storages_live_until_backward_and_no_longer():
    model = ForeignModel()
    ACTIVE_TRACE_SINK.arm()
    loss = model(ids()).square().mean()
    sink = ACTIVE_TRACE_SINK.disarm()
    watch = watch_trace(sink, model=model)
    sink.clear()
    watch.assert_released(storages=False)
    with pytest.raises(LeakError, match="its storage"):
        watch.assert_released()  # autograd owns them
    loss.backward()
    del loss
    watch.assert_released()


def test_a_probe_leaves_nothing():
    class Watching(NullCollector):
        def on_probe_step(self, step, sink, meta, per_token_loss):
            self.watch = watch_trace(sink)
            return {}

    collector = Watching()
    run_probe_forward(ForeignModel(), ids(), collector=collector, step=0)
    collector.watch.assert_released()


def test_an_empty_sink_has_nothing_to_leak():
    watch_trace({}).assert_released()
    assert_trace_released({})


def test_a_compilers_fake_tensors_are_no_leak():
    """They stay in its caches, with a node that is in no graph, and hold no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sink = {0: make_point(0)}
    watch = watch_trace(sink)
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(4, requires_grad=True).exp())
    sink.clear()
    watch.assert_released(storages=False)
    watch.assert_released()
    assert fake.grad_fn.name() == "torch::autograd::Error"
